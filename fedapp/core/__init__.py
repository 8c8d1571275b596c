"""Kernels shared by methods: pure NumPy and PyTorch, no Flower, no files, no global random numbers.

``averages``     weighted mean of models, added in place as replies arrive
``classmeans``   means per class, collected batch by batch
``contrastive``  supervised contrastive loss, model-contrastive loss, proximal terms
``classwise``    class-wise aggregation (cwFedAvg) and the weight-distribution regulariser
``distillation`` divergences between soft predictions
``gaussian``     per-class Gaussian statistics: streaming, merging, packing, sampling (CCVR)
``heads``        the linear head on given representations: logits, re-training, norms of its rows (CCVR)
``lowrank``      low-rank form of named arrays
``pairwise``     stacked-model kernels: linear combinations, Gram, distance and cosine matrices
"""
