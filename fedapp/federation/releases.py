"""The part of a noised reply that adds up over clients, for secure sums: the server sees no single reply."""

from __future__ import annotations

from fedapp.core.names import prefixed
from fedapp.core.privacy import Float64
from fedapp.method import Arrays
from fedapp.reduce.reader import Reader
from fedapp.transport.clipping import arrays_of
from fedapp.transport.secure import Released


def released(reader: Reader, exchange: str, template: Arrays) -> Released | None:
    """Return the part of replies that adds up where the sum has noise, or None in a run without `dp`.

    Parameters
    ----------
    template : arrays of the names, shapes and dtypes of a reply.
    """
    privacy = reader.policy.privacy
    if privacy is None:
        return None
    if noised := reader.noised(exchange):
        joint, prefix = noised.joint(reader.context), noised.prefix

        def parts(vector: Float64, clients: int) -> Arrays:
            return prefixed(prefix, joint.parts(vector))

        return Released(privacy, joint.sensitivity, joint.size, parts)
    size = sum(array.size for array in template.values())
    return Released(privacy, privacy.bound, size, lambda vector, clients: arrays_of(vector / clients, template))
