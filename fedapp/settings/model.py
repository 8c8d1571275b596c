"""The architecture, and the arguments of an own model."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

from pydantic import Field

from fedapp.errors import listed
from fedapp.settings._group import AUTO, Group, OrAuto


class ModelSettings(Group):
    """The architecture, and the arguments of an own model."""

    model: str = Field(
        "auto",
        description="architecture, or several, comma-separated, assigned to the clients in turn; your own: "
        "package.module:function; see fedapp models",
    )
    model_args: str = Field(
        "",
        description='further arguments of an own model, "name=value name=value"; those of identity: standardise=true, '
        "random-features=2000, gamma=0.3, seed=11",
    )
    head: str = Field("", description="layer of an own model that is its head; empty = the last Linear that fits")
    width: int = Field(0, ge=0, description="features of a layer added before the head of an own model; 0 = none")
    weights: str = Field("", description="file with weights of the model, .safetensors or .pt; the head is new")
    freeze: str = Field(
        "", description="layers of a model with weights that are neither trained nor sent, such as features.layer1"
    )
    input_size: Annotated[int, Field(ge=0, le=4096), OrAuto] = Field(
        AUTO,
        description="side in pixels to which an own model's images are resized; 0 = as they are; auto = with weights "
        "the size that torchvision states for its model, else 0",
    )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The architectures, in the order in which they are assigned to clients."""
        return tuple(listed(self.model))

    def name_of(self, client: int) -> str:
        """Return the architecture of a client, which its id decides."""
        return self.names[client % len(self.names)]
