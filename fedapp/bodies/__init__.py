"""Pretrained bodies: which there are, and how they turn pictures and texts into features."""
