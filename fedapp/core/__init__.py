"""Kernels shared by methods: pure NumPy and PyTorch, no Flower, no files, no global random numbers.

``averages``     weighted mean of models, added in place as replies arrive
``contrastive``  supervised contrastive loss, model-contrastive loss, proximal terms
``classwise``    class-wise aggregation (cwFedAvg) and the weight-distribution regulariser
``gaussian``     per-class Gaussian statistics: streaming, merging, packing, sampling (CCVR)
``pairwise``     stacked-model kernels: linear combinations, Gram, distance and cosine matrices
"""
