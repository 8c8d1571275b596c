"""docs/choosing.md: its measured tables by hand, what is kept of a run, and the page as the kept runs make it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from fedapp import registry
from fedapp.config import RunConfig, from_flat
from fedapp.engines.local import run_local
from fedapp.errors import BadRequest
from fedapp.method import TrainDefaults
from fedapp.results.intervals import differences_of
from fedapp.results.runs import RunResult
from reproduction.studies import choosing
from reproduction.studies.choosing import Block, Kept, definition, digest

BLOCK = definition().block[0]
NAMES = ("answer", "shortlist", "missing", "keys", "settings", "details", "gains")
PAGE = "".join(f"<!-- table:{name} -->\n<!-- /table:{name} -->\nbetween\n" for name in NAMES)


def kept(method: str, seed: int, trained: list[float]) -> Kept:
    return Kept(
        block="digits", method=method, seed=seed, made=digest(BLOCK, method, seed), fedapp="0", rows=(10,), total=(9,),
        bytes_up=1, bytes_down=2, seconds=3 + seed, trained=trained, received=trained,
    )  # fmt: skip


@pytest.mark.full
def test_the_page_holds_the_tables_of_the_kept_runs() -> None:
    text = (choosing.DOCS / "choosing.md").read_text(encoding="utf-8")
    kept = choosing.load(choosing.DOCS / "choosing.jsonl")
    made, picture = choosing.page(text, list(kept.values()))
    assert made == text, "run: python -m reproduction study choosing"
    caption = picture.rpartition("<!-- ")[2]
    assert (choosing.DOCS / choosing.PICTURE).read_text(encoding="utf-8").endswith(f"<!-- {caption}")
    blocks, methods = {block for block, _, _ in kept}, {method for _, method, _ in kept}
    every = {(block, method, seed) for block in blocks for method in methods for seed in range(3)}
    diverged = {("fashion-100", "ktpfl", 1), ("fashion-100", "ktpfl", 2)}
    assert every - kept.keys() == diverged, "a method that is measured in one setting is measured in all"


def test_every_method_runs_on_every_block_with_the_same_clients_images_and_rounds() -> None:
    common = attrgetter("data", "model", "federation.num_server_rounds", "training.local_epochs",
                        "training.batch_size", "evaluation.select", "data_seed")  # fmt: skip
    for block in definition().block:
        found = [from_flat(choosing.values_of(block, method, 1, Path("/data"))) for method in registry.discover()]
        assert [c.federation.method for c in found] == registry.ORDER
        assert len(set(map(common, found))) == 1, block.id
        assert found[0].evaluation.select == "last" and found[0].data.validation == 0 and found[0].data.public_data
        assert all(c.federation.method_args == "" and c.evaluation.final_training for c in found)
    assert choosing.values_of(definition().block[5], "local", 0, Path("/data"))["data-dir"] == "/data/har.npz"
    assert definition().seeds >= 3


def test_kept_runs_come_back_and_those_of_other_settings_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kept.jsonl"
    good, stale = kept("fedgh", 1, [0.5]), kept("local", 0, [0.25]).model_copy(update={"made": "0" * 12})
    gone = good.model_copy(update={"method": "nothing"})
    choosing.save(path, [good, kept("local", 2, [1 / 3])])
    assert [line.split(",")[1] for line in path.read_text().splitlines()] == ['"method":"fedgh"', '"method":"local"']
    path.write_text(path.read_text() + stale.model_dump_json() + "\n" + gone.model_dump_json() + "\n")
    found = choosing.load(path)
    assert found == {("digits", "fedgh", 1): good, ("digits", "local", 2): kept("local", 2, [1 / 3])}
    told = capsys.readouterr().err
    assert "left out: digits/local-s0" in told and "left out: digits/nothing-s1" in told
    assert choosing.load(tmp_path / "none") == {}
    digests = {digest(BLOCK, m, s) for m in ("local", "fedgh") for s in (0, 1)}
    assert len(digests) == 4


@pytest.mark.full
def test_one_command_runs_what_is_missing_and_makes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = {"num-server-rounds": 1, "local-epochs": 1}
    blocks = tuple(b.model_copy(update={"settings": {**b.settings, **quick}}) for b in definition().block)
    short = definition().model_copy(update={"seeds": 1, "block": blocks})
    monkeypatch.setattr(choosing, "definition", lambda: short)
    begun: list[str] = []

    def here(todo: Mapping[str, RunConfig], *_: Any) -> dict[str, str]:
        for name, config in todo.items():
            begun.append(name)
            run_local(config)
        return {}

    monkeypatch.setattr(choosing, "run_here", here)
    page, lines = tmp_path / "choosing.md", tmp_path / "choosing.jsonl"
    page.write_text(PAGE)
    made = partial(choosing.main, kept=lines, doc=page)
    run = partial(made, tmp_path / "runs", only="digits", methods="fedgh,local,again", workers=1)
    assert run() == 0 and "3 to run" in capsys.readouterr().err
    text = page.read_text()
    assert "(1 setting, 1 seed each; " in text and "| FedGH |" in text and text.count("between") == len(NAMES)
    unmeasured = text.partition("Not measured yet: ")[2].partition(".\n")[0].split("; ")
    methods = [choosing.title(m) for m in registry.discover() if m not in ("fedgh", "local")]
    assert unmeasured == methods + [block.title for block in definition().block[1:]]
    assert (tmp_path / choosing.PICTURE).is_file(), "the picture of the gains"
    assert begun == ["digits/fedgh-s0", "digits/local-s0", "digits/again-s0"]
    runs = choosing.load(lines)
    alone, again, fedgh = (runs["digits", name, 0] for name in ("local", choosing.AGAIN, "fedgh"))
    assert (alone.rows, alone.total) == (again.rows, again.total), "the same partition"
    assert alone.trained != again.trained and alone.trained_all != again.trained_all, "another training seed"
    table = RunResult(tmp_path / "runs/digits/fedgh-s0").final.sort_values("client")
    counts = [round(share * total) for share, total in zip(fedgh.trained, fedgh.total, strict=True)]
    assert counts == table["trained_correct"].tolist() and list(fedgh.rows) == table["num_samples"].tolist()
    lines.unlink()
    assert run() == 0 and "3 finished below" in capsys.readouterr().err, "runs that are there count"
    assert len(begun) == 3
    assert made() == 0 and page.read_text() == text, "without a folder: the same tables of what is kept"
    for wrong, told in (({"only": "digit"}, "no block 'digit', did you mean"), ({"methods": "fedhg"}, "no method")):
        with pytest.raises(BadRequest, match=told):
            made(**wrong)
    page.write_text("nothing")
    with pytest.raises(BadRequest, match="lacks the markers"):
        made()


def with_rows(block: Block, method: str, seed: int, share: float, everywhere: float = 0.4) -> Kept:
    """A run of ten clients with 100 test rows each, which all have the same score."""
    scores = [share] * 10
    return Kept(
        block=block.id, method=method, seed=seed, made="", fedapp="0", rows=(50, 80) * 5, total=(100,) * 10,
        received=scores, trained=scores, received_all=(everywhere,) * 10, trained_all=(everywhere,) * 10,
        bytes_up=2600, bytes_down=2600, seconds=1,
    )  # fmt: skip


def first_lines(runs: list[Kept]) -> str:
    known = choosing.every_block(runs)
    return "\n".join([*choosing.answer(runs, known), *choosing.missing(runs, known), *choosing.settings(known)])


def test_the_page_names_each_method_with_training_defaults_of_its_own() -> None:
    """SCAFFOLD's four differ from the common ones, and so do FedClassAvg's pictures."""
    told = choosing.other_defaults()
    assert "SCAFFOLD (lr 0.1, lr on digits 0.1, momentum 0.0, clip 10.0)" in told
    named = {m for m in registry.discover() if f"{registry.get(m).title} (" in told}
    assert named == {m for m in registry.discover() if registry.get(m).defaults != TrainDefaults()}


def test_the_page_begins_with_the_answer_and_a_shortlist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four methods in a full and a sampled setting: one is 8 points better, one 20 worse, one equal; chance is none."""
    blocks = tuple(b for b in definition().block if b.id in ("digits", "fashion-100"))
    short = definition().model_copy(update={"block": blocks})
    monkeypatch.setattr(choosing, "definition", lambda: short)
    known = {m: registry.get(m) for m in ("local", "fedgh", "fedavg", "lgfedavg", "fedper")}
    monkeypatch.setattr(choosing.registry, "discover", lambda: known)
    shifts = {"local": 0.0, "again": 0.01, "fedgh": 0.08, "fedavg": -0.2, "lgfedavg": 0.0}
    runs = [
        with_rows(block, method, seed, 0.5 + 0.01 * seed + shift, 0.7 if method == "fedavg" else 0.4)
        for block in blocks for method, shift in shifts.items() for seed in range(3)
    ]  # fmt: skip
    runs.append(with_rows(blocks[0], "fedper", 0, 0.5, 0.4))  # one seed of three
    text = first_lines(runs)
    assert "6 comparisons with training alone (2 settings, 3 seeds each; " in text
    assert "): 2 better, 2 worse, 2 equal within the margin, 0 open" in text
    digits = choosing.compared(runs, "digits")
    assert digits is not None
    wanted = differences_of({"a": [0.08] * 3, "b": [-0.2] * 3, "c": [0.0] * 3}, 1 / 1000)["a"]
    assert (digits.methods["fedgh"].low, digits.methods["fedgh"].high) == pytest.approx((wanted.low, wanted.high))
    shown = f"+8.0 ({100 * wanted.low:+.1f} to {100 * wanted.high:+.1f})"
    assert f"**FedGH** is better by {shown} points (Fashion-MNIST, 20 of 100 clients a round, Dirichlet 0.1)." in text
    assert f"**FedGH** is better by {shown} points (Digits, 10 clients, Dirichlet 0.5). It helps 10 of 10 " in text
    assert (
        "clients there and harms 0. A client sends 2,600 B a round. Exchanged: class means up, the head down. The "
        "payload shows a client's classes." in text
    )
    assert (
        "The 2 methods of the shortlist help 0 to 100 % of all clients and harm 0 to 0 %. A client sends 2,600 B to "
        "2,600 B a round (Digits, 10 clients, Dirichlet 0.5), class statistics with 1 of them." in text
    )
    assert "makes 0 to 0 % of the clients of a setting lose by chance" in text
    assert "Not finished in all seeds (Digits, 10 clients, Dirichlet 0.5): FedPer." in text
    row = next(line for line in text.splitlines() if line.startswith("| Digits"))
    assert row == (
        f"| Digits, 10 clients, Dirichlet 0.5 | 51.0 | FedGH {shown} | 1 / 0 / 1 | FedAvg, 10.0 of 10 | 0.0 "
        "| FedAvg, 70.0 (alone 40.0) |"
    )
    first, _, *leaves = choosing.shortlist(runs, choosing.every_block(runs))
    table = choosing.details(runs, choosing.every_block(runs))[2:]
    both = "[LG-FedAvg](methods/lgfedavg.md) +0.0 | [FedGH](methods/fedgh.md) +8.0"
    assert leaves[2:] == [
        f"| {choosing.NEEDS[0]} | {both} |",
        *(f"| {need} | none | none |" for need in choosing.NEEDS[1:]),
    ]
    assert first.startswith("In no setting is one of these 2 of 4 methods shown to be worse than training alone.")
    assert [line.split(" | ")[0] for line in table[2:-2]] == ["| Standalone", "| LG-FedAvg", "| FedGH"], (
        "by what is revealed"
    )
    assert "any | yes | no | 2.6 | 2 / 0 / 0 |" in table[-3]
    assert table[-1] == "Not on the shortlist, with the lowest difference: FedAvg -20.0."
    page, picture = choosing.page(PAGE, runs)
    assert all(line in page for line in text.splitlines()) and page.count("between") == 7
    told = "Of 60 clients, those with at most 65 training rows gain +4.0 points on average, those with more +4.0."
    assert told in page and told in picture, "the median of +0 and +8 points"
    low = {"received": (0.3,) * 10, "trained": (0.3,) * 10}
    mixed = [r.model_copy(update=low) if (r.block, r.method) == ("fashion-100", "fedgh") else r for r in runs]
    told = first_lines(mixed)
    assert "It is worse elsewhere: -21.0 (Fashion-MNIST, 20 of 100 clients a round" in told
    assert "20 of 100 clients a round, Dirichlet 0.1), no method is better than training alone." in told
    second = [with_rows(b, "fedper", s, 0.57 + 0.01 * s - 0.3 * (b is blocks[1])) for b in blocks for s in range(3)]
    told = first_lines([*(r for r in runs if r.method != "fedper"), *second])
    assert re.search(r"Better there too: FedPer by \+7\.0 \([^)]+\), worse elsewhere: -23\.0 \(Fashion", told)
    unequal = [run for run in runs if (run.block, run.method, run.seed) != ("digits", "again", 2)]
    text = first_lines(unequal)
    assert text.endswith("| 1 / 0 / 1 | FedAvg, 10.0 of 10 |"), "columns that not every setting can fill are left out"
    fewer = [run for run in runs if (run.block, run.method, run.seed) != ("digits", "local", 2)]
    assert "Not measured yet: Digits" in first_lines(fewer)
    assert choosing.answer([], []) == choosing.shortlist([], []) == [choosing.UNMEASURED]


def test_the_flow_chart_names_methods_of_the_shortlist() -> None:
    """Each leaf with a need of the shortlist: its first line sends no class statistics, its second line does."""
    chart = (choosing.DOCS / "pictures" / "choosing.svg").read_text(encoding="utf-8")
    pair = r'<text class="t" x="(?:344|142)"[^>]*>([^<]+)</text>\n<text class="s"[^>]*>([^<]+)<'
    _, *leaves = re.findall(pair, chart)
    page = (choosing.DOCS / "choosing.md").read_text(encoding="utf-8")
    for need, (first, second) in zip(choosing.NEEDS, leaves, strict=True):
        cells = next(line for line in page.splitlines() if line.startswith(f"| {need} |")).split(" | ")[1:]
        for told, cell in zip((first, second.removeprefix("class statistics: ")), cells, strict=True):
            assert all(f"[{name}]" in cell or cell.startswith(name) for name in told.split(", ")), (need, told)
