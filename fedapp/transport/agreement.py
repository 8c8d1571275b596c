"""What clients must agree on before they share anything, and who is right if they do not."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedapp.errors import counted, described
from fedapp.method import ClientInfo, Method

Facts = Mapping[str, Any]
"""What a client stated when it registered, next to its `ClientInfo`."""


def by_body(infos: Mapping[int, ClientInfo], bodies: Sequence[str]) -> tuple[dict[str, list[int]], dict[int, str]]:
    """Group clients by the pretrained body that they state.

    Parameters
    ----------
    bodies : first digits of those that may take part; empty = the clients are one group.

    Returns
    -------
    The clients by the digest of their body, and by client why it is in no group. Of several digests that begin with
    the same listed digits the most frequent one counts.
    """
    if not bodies:
        return {"": sorted(infos)}, {}
    stated = {c: i.body for c, i in sorted(infos.items())}
    found = [Counter(body for body in stated.values() if body.startswith(digits)).most_common(1) for digits in bodies]
    taken = [body for most in found for body, _ in most]
    why = f"is not among those of the run ({', '.join(taken or bodies)})"
    left = {c: f"the body of client {c} ({body or 'none'}) {why}" for c, body in stated.items() if body not in taken}
    return {body: [c for c in stated if stated[c] == body] for body in taken}, left


def other_classes(a: ClientInfo, b: ClientInfo, facts_a: Facts, facts_b: Facts) -> str | None:
    """Return how the classes of two clients differ, or None."""
    one, other = f"client {a.client}", f"client {b.client}"
    if a.num_classes != b.num_classes:
        counts = f"{other} has {counted(b.num_classes, 'class')}, but {one} has {a.num_classes}"
        return f"{counts}: all clients need the same classes"
    if facts_a.get("classes") and facts_b.get("classes") and facts_a["classes"] != facts_b["classes"]:
        return (
            f"the classes of {other} have other names than those of {one}: "
            "name the federation's classes with --set class-names=a,b,c"
        )
    return None


def clash(method: Method, a: ClientInfo, b: ClientInfo, facts_a: Facts, facts_b: Facts) -> str | None:
    """Return on what two clients disagree, or None."""
    one, other = f"client {a.client}", f"client {b.client}"
    if problem := other_classes(a, b, facts_a, facts_b):
        return problem
    inputs = [described(tuple(json.loads(str(f["shape"])))) for f in (facts_a, facts_b)]
    if not method.heterogeneous and inputs[0] != inputs[1]:
        return f"{other} has {inputs[1]}, but {one} {inputs[0]}: {method.id} needs one kind, so convert them"
    if not method.heterogeneous and a.model != b.model:
        return (
            f"{method.id} needs one architecture, but {other} has {b.model} and {one} {a.model}: set model to one "
            "name, or choose a method that allows several (fedapp methods)"
        )
    for fact in sorted(set(a.common) | set(b.common)):
        if fact == "weights" and a.model != b.model:
            continue  # those of one model say nothing of another, such as one that a node brings
        if a.common.get(fact) != b.common.get(fact):
            return (
                f"the {fact} of {other} ({b.common.get(fact)}) differs from that of {one} ({a.common.get(fact)}): "
                f"{method.id} needs the same at all clients"
            )
    for name in sorted(set(a.shapes) | set(b.shapes)):
        x, y = a.shapes.get(name), b.shapes.get(name)
        if x != y:
            remedy = "choose models of one family (one feature width)"
            if a.model == b.model and inputs[0] != inputs[1]:
                remedy = f"{method.id} cannot share it between clients with samples of two sizes, so bring them to one"
            return (
                f"'{name}' is shared but {one} ({a.model}) has {_shape(x)} and {other} ({b.model}) has {_shape(y)}: "
                f"{remedy}"
            )
    if method.same_width and (method.shared != () or method.extra_up) and facts_a["width"] != facts_b["width"]:
        widths = sorted((int(facts_a["width"]), int(facts_b["width"])))
        return (
            f"{method.id} compares representations, but the models of {one} and {other} have widths {widths}: choose "
            "models of one family"
        )
    return None


def majority(
    method: Method, infos: Mapping[int, ClientInfo], facts: Mapping[int, Facts]
) -> tuple[int | None, dict[int, str]]:
    """Find the clients that agree.

    Returns
    -------
    The lowest id of the clients that more than half agree with, None where there is no such client; and by client, on
    what it disagrees with that one, or with the first client where there is none.
    """
    ids = sorted(infos)

    def others(of: int) -> dict[int, str]:
        found = ((c, clash(method, infos[of], infos[c], facts[of], facts[c])) for c in ids if c != of)
        return {c: text for c, text in found if text is not None}

    first: dict[int, str] | None = None
    for c in ids:
        apart = others(c)
        if 2 * len(apart) < len(ids):
            return c, apart
        first = apart if first is None else first
    return None, first or {}


def compared(info: ClientInfo, others: Sequence[int], infos: Mapping[int, ClientInfo]) -> list[int]:
    """Return with which of the `others` a client is compared: the first, and the first that has its model."""
    same = (c for c in others if infos[c].model == info.model)
    return [*dict.fromkeys([*others[:1], *itertools.islice(same, 1)])]


def within_models(method: Method, infos: Mapping[int, ClientInfo], facts: Mapping[int, Facts]) -> dict[int, str]:
    """Return by client on what it disagrees with the first one of its own model."""
    first: dict[str, int] = {}
    for c in sorted(infos):
        first.setdefault(infos[c].model, c)
    found = ((c, first[i.model], i) for c, i in sorted(infos.items()))
    texts = {c: clash(method, infos[other], i, facts[other], facts[c]) for c, other, i in found if c != other}
    return {c: text for c, text in texts.items() if text is not None}


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no array of that name" if shape is None else f"shape {shape}"
