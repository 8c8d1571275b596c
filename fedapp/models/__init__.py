"""Models: a body of any architecture and one linear head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedapp.models.frozen import ADAPTER, IDENTITY
from fedapp.models.own import check_form, is_own
from fedapp.models.zoo import MODEL_NAMES, build_model, check_model, default_model, default_small, head_width

if TYPE_CHECKING:
    from fedapp.models.split import SplitModel

__all__ = [
    "ADAPTER", "IDENTITY", "MODEL_NAMES", "SplitModel", "build_model", "check_form", "check_model", "default_model",
    "default_small", "head_width", "is_own",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the class of all models, and PyTorch with it, when it is asked for."""
    if name == "SplitModel":
        from fedapp.models.split import SplitModel

        return SplitModel
    raise AttributeError(f"module 'fedapp.models' has no attribute '{name}'")
