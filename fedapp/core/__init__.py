"""Kernels shared by methods: pure NumPy and PyTorch, no Flower, no files, no global random numbers.

``averages``     weighted mean of models, updated in place as replies arrive
``classmeans``   means per class, collected batch by batch
``classwise``    class-wise aggregation (cwFedAvg) and the weight-distribution regulariser
``contrastive``  supervised contrastive loss, model-contrastive loss, proximal terms
``distillation`` divergences between soft predictions
``gaussian``     per-class Gaussian statistics of features: accumulate, send, pool (CCVR)
``heads``        the linear head on given representations: logits, re-training, norms of its rows (CCVR)
``lowrank``      low-rank form of named arrays (FedKD)
``pairwise``     kernels on all models at once: linear combinations, Gram, distance and cosine matrices
``products``     matrix products in float32 at the speed of the processor
``robust``       averages, and rules of single methods, that a few lying clients cannot pull where they like
``virtual``      virtual features drawn from Gaussian statistics (CCVR)
"""
