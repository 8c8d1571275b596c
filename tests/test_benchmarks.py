"""The benchmark in its small form: every part runs, alternatives agree, both files are written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import frozen, machine, report, server
from benchmarks.overhead import CASES
from benchmarks.rounds import SMALL, random_images
from benchmarks.timing import Times, alternate
from fedapp.bodies import extraction, known
from fedapp.data.columns import PLAIN
from tests.test_features import picture_body


@pytest.mark.full
def test_the_small_form_writes_every_figure(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        figures = bench.measure(list(bench.PARTS), None, True, tmp_path / "work")
    finally:
        torch.set_num_threads(threads)
    report.write(tmp_path, figures)
    written = json.loads((tmp_path / "performance.json").read_text())
    left_out = {"overhead_"} if figures["machine"]["bf16"] else {"overhead_", "fedavg_vs_reference_bf16"}
    asked = {key for key, *_ in report.TARGETS if not key.startswith(tuple(left_out))}
    assert asked <= written.keys()
    assert all(written[key] > 0 for key in asked)
    assert written["gpu_clients_per_second_1"] > 0
    page = (tmp_path / "performance.md").read_text()
    order = [line for line in page.splitlines() if line.startswith("###")]
    assert order == [f"### {title}" for title in report.TABLES]
    report.write(tmp_path, {"average_over_floor": 1.25, "machine": {**figures["machine"], "cores": 77}})
    renewed = (tmp_path / "performance.md").read_text()
    assert [line for line in renewed.splitlines() if line.startswith("###")] == order, "replaced, not added"
    assert "### Machine\n\n77 cores of " in renewed and "| at most 1.5 | 1.25 | reached |" in renewed
    again = json.loads((tmp_path / "performance.json").read_text())
    machine = {**written["machine"], "cores": 77}
    assert again == {**written, "average_over_floor": 1.25, "machine": machine}, "what was not measured stays"


def test_one_part_does_not_join_the_tables_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "performance.json").write_text(json.dumps({"machine": {**machine.describe(), "processor": "Z80"}}))
    monkeypatch.setattr("sys.argv", ["benchmarks", "--only", "server", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        bench.main()
    assert "of another machine (processor Z80): give --out" in capsys.readouterr().err


def test_the_page_holds_the_tables_of_what_is_kept() -> None:
    docs = Path(__file__).parents[1] / "docs"
    text, kept = (Path(docs, f"performance.{kind}").read_text(encoding="utf-8") for kind in ("md", "json"))
    assert report.page(text, json.loads(kept), docs) == text, "run: make bench"


@pytest.mark.parametrize("row", server.SMALL, ids=lambda row: row.name)
def test_naive_form_and_ours_agree(row: server.Row) -> None:
    problem = row.problem()
    if not problem.random:
        assert server.difference(problem.naive(), problem.ours()) < 1e-5


def test_clients_per_second_on_a_gpu() -> None:
    known = report.spread("gpu_clients_per_second_4", [5.0, 4.0, 2.5])
    assert report.gpu_table(known)[2:] == ["| 4 | 4.00 | 2.50 to 5.00 |"]


def test_the_keys_of_the_overhead_cases() -> None:
    keys = {case.key for case in CASES}
    assert {"overhead_20x4mb_seconds", "overhead_20x45mb_seconds", "overhead_1000_sample_100_seconds"} <= keys
    assert len(keys) == len(CASES)


def test_alternatives_are_called_in_turn_and_may_measure_themselves() -> None:
    calls: list[str] = []

    def slow() -> float:
        calls.append("slow")
        return 3.0 * len(calls)

    def fast() -> float:
        calls.append("fast")
        return 1.0 * len(calls)

    times = alternate({"slow": slow, "fast": fast}, repeats=3, warmup=1)
    assert calls == ["slow", "fast"] * 4
    assert times.seconds == {"slow": [9.0, 15.0, 21.0], "fast": [4.0, 6.0, 8.0]}
    assert times.median("slow") == 15.0
    assert times.ratio("slow", "fast") == 15 / 6


def test_extraction_is_timed_without_reading_against_the_same_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    rng, file = np.random.default_rng(0), tmp_path / "p.npz"
    np.savez(file, x=rng.integers(0, 256, (300, 8, 8, 3), dtype=np.uint8), y=np.arange(300) % 3)
    body = known.chosen(str(picture_body(tmp_path / "body.onnx")), size=8, mean=(127.0,), std=(128.0,))
    ran: list[int] = []

    def counted(call: Callable[[], object]) -> float:
        ran.append(0)
        call()
        return 3.0 - len(ran) % 3  # reading 2, the extraction with it 1, the forward pass 3

    monkeypatch.setattr(frozen, "processor_seconds", counted)
    given = extraction.of_files(file, "", PLAIN)
    times = frozen.extracted(given, body, tmp_path, 1)
    assert times.seconds == {"reading": [2.0], "extraction": [-1.0], "forward": [3.0]}
    assert len(ran) == 6 and not (tmp_path / "features.npz").exists()


@pytest.mark.full
def test_rounds_of_both_methods_are_timed(tmp_path: Path) -> None:
    data = random_images(tmp_path / "data", 360)
    (data / "cifar10.npz").rename(data / "fashion_mnist.npz")
    times = frozen.rounds(data, tmp_path, SMALL)
    limit = {"round of FedRep / of FedAvg": (times, "fedrep", "fedavg")}
    assert " | 2 | 1.8 | " in frozen.table(limit)[-1] and min(times.ratios("fedrep", "fedavg")) > 0


def test_a_target_is_met_at_its_bound() -> None:
    for key, value, verdict in (("ccvr_sampling_vs_numpy", 4.0, "reached"), ("average_over_floor", 1.5, "reached"),
                                ("ccvr_sampling_vs_numpy", 3.99, "not reached")):  # fmt: skip
        assert report.targets_table({key: value})[-1].endswith(f" | {verdict} |")
    table = report.targets_table({"average_over_floor": 1.6})
    assert table[-1].endswith("| at most 1.5 | 1.60 | not reached |")
    assert Times({"a": [2.0, 4.0], "b": [1.0, 1.0]}).ratios("a", "b") == [2.0, 4.0]


@pytest.mark.parametrize(
    "value, shown", [(1.42, "1.42 | reached"), (1.504, "1.504 | not reached"), (1.61, "1.61 | not reached")]
)
def test_rounding_does_not_hide_a_verdict(value: float, shown: str) -> None:
    [row] = report.targets_table({"average_over_floor": value})[2:]
    assert row.endswith(f"| at most 1.5 | {shown} |")
