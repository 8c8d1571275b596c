"""Messages to and from real nodes in few pieces.

Flower takes a message apart into objects, two for each array, and asks for each of them by itself, which takes the
SuperLink 12 ms. So the arrays travel as one array of bytes, and those that several messages share as another one, which
the SuperLink keeps once. A node answers in the form in which it was asked. Messages within a simulation stay as they
are.

A pack begins with the length of its index. The index lists names, dtypes, shapes and sizes, as JSON. After it come the
arrays, each as :func:`fedapp.transport.records.encoded` made it, at multiples of 64 bytes as NumPy places its numbers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Array as FlowerArray
from flwr.app import Message, RecordDict

from fedapp.transport.records import ARRAYS, recorded

PACKED = "packed"
"""Name of the record that stands for the one of arrays."""
SHARED, OWN = "shared", "own"
"""Names of the packs in it: what several messages have in common, and what only this one has."""
STYPE = "fedapp.pack"
ALIGNED = 64
"""Arrays begin at multiples of so many bytes."""
INDEX = 1 << 20
"""Largest index in bytes, which as JSON may take forty times as much memory. 1,550 arrays take 0.2 MB."""
LENGTH = 8
"""Bytes that say how long the index is."""


def pack(messages: Iterable[Message]) -> None:
    """Pack the arrays of messages that are sent together, in place; errors have none."""
    sent = [message for message in messages if not message.has_error()]
    uses = Counter(id(a) for m in sent for a in m.content.array_records.get(ARRAYS, {}).values())
    known: dict[tuple[int, ...], FlowerArray | None] = {}
    for message in sent:
        content = message.content
        arrays: Mapping[str, FlowerArray] = content.array_records.get(ARRAYS, {})
        shared = {name: a for name, a in arrays.items() if uses[id(a)] > 1}
        own = {name: a for name, a in arrays.items() if name not in shared}
        packs: dict[str, FlowerArray | None] = {}
        if shared:
            which = tuple(map(id, shared.values()))
            if which not in known:
                known[which] = joined(shared)
            packs[SHARED] = known[which]
        if own:
            packs[OWN] = joined(own)
        good = {name: whole for name, whole in packs.items() if whole is not None}
        if good.keys() != packs.keys():
            continue  # a receiver takes both forms
        # Flower keeps an empty record, so that a node sees in which form it was asked.
        rest = {name: record for name, record in content.items() if name != ARRAYS and record}
        message.content = RecordDict({**rest, PACKED: recorded(good)})


def joined(arrays: Mapping[str, FlowerArray]) -> FlowerArray | None:
    """Return encoded arrays as one, or None if they are too many for a receiver."""
    index = json.dumps({name: (a.dtype, a.shape, a.stype, len(a.data)) for name, a in arrays.items()}).encode()
    if len(index) > INDEX:
        return None
    parts = [len(index).to_bytes(LENGTH, "big"), index]
    size = LENGTH + len(index)
    for array in arrays.values():
        parts += [bytes(-size % ALIGNED), array.data]
        size += -size % ALIGNED + len(array.data)
    return FlowerArray("uint8", (size,), STYPE, b"".join(parts))


def unpack(content: RecordDict) -> bool:
    """Put the arrays of a pack where they were before, in place; they are views of it.

    Returns
    -------
    Whether there was one.

    Raises
    ------
    ValueError : this is not a pack, or it holds something twice. The contents of its arrays are not checked.
    """
    if PACKED not in content.array_records:
        return False
    arrays: dict[str, FlowerArray] = {}
    packs = content.array_records[PACKED]
    del content[PACKED]
    for name, whole in packs.items():
        found = apart(whole)
        if name not in (SHARED, OWN) or found.keys() & arrays.keys() or ARRAYS in content:
            raise ValueError("its arrays are packed twice")
        arrays |= found
    if arrays:
        content[ARRAYS] = recorded(arrays)
    return True


def apart(whole: FlowerArray) -> dict[str, FlowerArray]:
    """Return the arrays of a pack.

    Raises
    ------
    ValueError : it is none.
    """
    data = memoryview(whole.data)
    size = LENGTH + int.from_bytes(data[:LENGTH], "big")
    if size > LENGTH + INDEX:
        raise ValueError(f"the index of a pack has {size - LENGTH} bytes, at most {INDEX} are possible")
    listed: Any = json.loads(bytes(data[LENGTH:size]))
    if not isinstance(listed, dict):
        raise ValueError("its arrays are not a pack")
    found = {}
    for name, (dtype, shape, stype, length) in listed.items():
        size += -size % ALIGNED
        if not (
            type(dtype) is type(stype) is str and isinstance(shape, list) and isinstance(length, int) and length >= 0
        ):
            raise ValueError("the index of a pack holds something else than arrays")
        found[name] = array = FlowerArray.__new__(FlowerArray)  # the constructor of Flower's takes bytes alone
        array.__dict__.update(dtype=dtype, shape=tuple(shape), stype=stype, data=data[size : size + length])
        size += length
    if size != len(data):
        raise ValueError(f"a pack has {len(data)} bytes, and its index says {size}")
    return found
