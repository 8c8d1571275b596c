"""Models: a trunk of any architecture and one linear head."""

from __future__ import annotations

from fedapp.models.split import SplitModel
from fedapp.models.zoo import MODEL_NAMES, build_model, check_model, default_model, default_small, head_width

__all__ = ["MODEL_NAMES", "SplitModel", "build_model", "check_model", "default_model", "default_small", "head_width"]
