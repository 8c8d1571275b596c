"""The table of what each method declares, and each of its variants: `python -m tools.declarations` writes it.

The table says what the rest of the package may do with a method's replies: which rules against liars fit, whether
sample counts can be capped, whether replies can be summed unseen, for which units of privacy there is noise, what
replies tell of single classes, which numbers they may hold, and which arrays travel. A variant is another value of one
choice among the hyperparameters; the table has the lines in which it differs from the defaults.
`tests/test_goldens.py` compares the table with the code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from fedapp import registry
from fedapp.errors import BadRequest

TABLE = Path(__file__).with_name("declarations.txt")


def declared(method: str, args: str) -> dict[str, str]:
    """Return what a method declares with these hyperparameters, in words.

    Raises
    ------
    BadRequest : the method does not take them.
    """
    found, hparams = registry.configured(method, args)
    guards, sums, least = found.guarded_by(hparams), found.sums(hparams), found.class_threshold(hparams)
    every = {None: "nothing", "": "every class that a client has"}
    return {
        "robust": " ".join(g for g in guards if g != "count-cap"),
        "robust in training": "rules" if found.votes_on(hparams) else "",
        "count cap": f"{found.usual_cap(hparams):g} x median" if "count-cap" in guards else "",
        "sums": " ".join([sums.weights, *sums.totals, sums.rows]).strip() if sums else "",
        "privacy": " ".join(found.units(hparams)),
        "per class": every.get(least) or f"classes of at least {least} samples",
        "columns": " ".join(found.columns),
        "numbers": " ".join(sorted(found.numbers)),
        "down": " ".join(found.shared_prefixes(hparams)),
        "up": " ".join((*found.up_prefixes(hparams), *found.extra_up)),
        "queries": " ".join(found.queries),
    }


def choices(name: str, field: FieldInfo, methods: list[str]) -> list[str]:
    """Return the values of a hyperparameter that is a choice."""
    if name == "base":
        return [*methods, "none"]
    if get_origin(field.annotation) is Literal:
        return [str(value) for value in get_args(field.annotation)]
    return ["false", "true"] if field.annotation is bool else []


def table() -> str:
    """Return the table: a block of lines for each method, and for each variant the lines that differ."""
    lines = []
    methods = registry.discover()
    for method, found in sorted(methods.items()):
        usual = declared(method, "")
        lines += [f"{method}, {what}: {value or '-'}" for what, value in usual.items()]
        for name, field in found.hparams.model_fields.items():
            for value in choices(name, field, sorted(methods)):
                args = f"{name}={value}"
                try:
                    changed = declared(method, args)
                except BadRequest:
                    continue
                lines += [f"{method} {args}, {w}: {v or '-'}" for w, v in changed.items() if v != usual[w]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
