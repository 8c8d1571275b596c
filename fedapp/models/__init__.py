"""Models: a trunk of any architecture and one linear head."""

from __future__ import annotations

from fedapp.models.own import ModelOptions, check_form, is_own
from fedapp.models.split import SplitModel
from fedapp.models.zoo import MODEL_NAMES, build_model, check_model, default_model, default_small, head_width

__all__ = [
    "MODEL_NAMES", "ModelOptions", "SplitModel", "build_model", "check_form", "check_model", "default_model",
    "default_small", "head_width", "is_own",
]  # fmt: skip
