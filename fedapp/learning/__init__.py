"""How a client learns: its task, the training loop, evaluation, metrics, and the state it keeps between rounds."""
