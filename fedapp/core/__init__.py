"""Kernels shared by methods: pure NumPy and PyTorch, no Flower, no files, no global random numbers.

``adaptation``    Gaussians of one covariance, adapted to one client (pFedFDA)
``averages``      weighted mean of models, updated in place as replies arrive
``classmeans``    means per class, collected batch by batch
``classwise``     class-wise aggregation (cwFedAvg) and the weight-distribution regulariser
``collaboration`` which heads help a client, and their best combination (FedPAC)
``contrastive``   supervised contrastive loss, model-contrastive loss, proximal terms
``distillation``  divergences between soft predictions
``gaussian``      per-class Gaussian statistics of features: accumulate, send, pool (CCVR)
``heads``         the linear head on given representations: logits, re-training, norms of its rows (CCVR)
``lowrank``       low-rank form of named arrays (FedKD)
``masks``         whole numbers modulo 2^64 instead of fractions, and random numbers that hide them
``mixture``       Gaussians of one class at several clients, pooled or apart (FedGHG)
``names``         names of arrays: prefixes, and payloads that are split by them
``noise``         the discrete Gaussian, drawn exactly
``pairwise``      kernels on all models at once: linear combinations, Gram, distance and cosine matrices
``privacy``       bounds, the Gaussian mechanism and its accountant
``products``      matrix products in float32 at the speed of the processor
``prototypes``    trainable prototypes and their margin (FedTGP)
``robust``        averages, and rules of single methods, that a few malicious clients cannot control
``secret_shares`` secrets in shares; some of the shares give them back
``secure_sum``    sums whose single parts stay hidden from the server
``simplex``       the smallest value of a quadratic form on the simplex
``sums``          linear heads in closed form, from sums over samples
``virtual``       virtual features drawn from Gaussian statistics (CCVR)
"""
