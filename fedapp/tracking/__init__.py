"""Trackers that follow a run: TensorBoard, MLflow, Weights & Biases, and those of installed packages."""
