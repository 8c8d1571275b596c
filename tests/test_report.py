"""The page of a run and of a comparison: whole, honest, self-contained, and readable in a real browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
from threadpoolctl import threadpool_info, threadpool_limits
from typer.testing import CliRunner

from fedapp import cli
from fedapp.engines.local import run
from fedapp.errors import BadRequest
from fedapp.experiments import tables
from fedapp.experiments.jobs import Job, Variant
from fedapp.results import answers, report
from fedapp.results.figures import Gallery
from fedapp.results.runs import read_comparison, read_run
from fedapp.results.tables import tables_of
from tests import madeup

SMALL: dict[str, Any] = {"dataset": "digits", "clients": 3, "rounds": 2, "local_epochs": 1, "batch_size": 16}
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that tags close in order, and collects ids, references, texts and table cells."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.resources: list[str] = []
        self.rows: list[list[str]] = []
        self.text: list[str] = []
        self.unnamed: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {k: v or "" for k, v in attrs}
        self.tags[tag] += 1
        if tag not in VOID:
            self.open.append(tag)
        if "id" in values:
            self.ids.append(values["id"])
        for name in ("href", "xlink:href", "src"):
            if name in values:
                (self.links if tag == "a" else self.resources).append(values[name])
        if tag == "svg" and "role" in values:
            self.links.append("#" + values["aria-labelledby"])
        if tag == "img" and not values.get("alt"):
            self.unnamed.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes <{self.open[-1:]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text.append(data)
        if any(t in ("td", "th") for t in self.open) and self.rows:
            self.rows[-1][-1] += data

    @property
    def said(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def single(folder: Path) -> Path:
    run(**{**SMALL, "method": "ccvr", "out": folder / "one"})
    report.write(folder / "one")
    return folder / "one"


@pytest.fixture(scope="module")
def several(folder: Path) -> Path:
    out = folder / "several"
    for method in ("local", "fedavg", "cwfedavg"):
        for seed in (0, 1):
            run(**{**SMALL, "method": method, "seed": seed, "out": out / "runs" / f"{method}-s{seed}"})
    runs = read_comparison(out).runs
    jobs = [Job(Variant(r.label, r.method), "", r.seed, r.config.replaced(out=str(r.out))) for r in runs if r.config]
    tables.write(out, jobs, [], "local", None, [], [], "fedapp compare --methods local,fedavg,cwfedavg --seeds 2")
    report.write(out)
    return out


def page(path: Path) -> Page:
    return Page((path / "report.html").read_text(encoding="utf-8"))


def copy(path: Path, to: Path) -> Path:
    """Copy directories without page and clients' states: nothing is computed from models then, which is quick."""
    shutil.copytree(path, to, ignore=shutil.ignore_patterns("report.html", "state", "checkpoint", "models"))
    return to


# ---- whole and self-contained ----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("which", ["single", "several"])
def test_the_page_is_whole_and_loads_nothing(which: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(which)
    text = (path / "report.html").read_text(encoding="utf-8")
    found = Page(text)
    assert text.startswith("<!doctype html>")
    assert "default-src 'none'" in text
    assert found.tags["script"] == 1 and found.tags["link"] == found.tags["iframe"] == 0
    script = re.search("<script>(.*)</script>", text, flags=re.DOTALL)
    assert script is not None and len(script[1]) < 3500
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert [i for i, n in Counter(found.ids).items() if n > 1] == []
    for reference in found.links:
        there = reference[1:] in found.ids if reference.startswith("#") else (path / unquote(reference)).exists()
        assert there, f"{reference} leads nowhere"
    for resource in found.resources:
        assert resource.startswith("data:image/png;base64,") or resource[1:] in found.ids, resource[:80]
    for reference in re.findall(r"url\(([^)]*)\)", text):
        assert reference.startswith("#")
    assert "@import" not in text
    assert found.unnamed == []
    assert 2 * found.tags["figure"] == len(re.findall(r'role="img"', text)) >= 10, (
        "one for wide and one for narrow pages"
    )
    assert found.tags["figure"] == text.count('<svg class="narrow"') == text.count('<svg class="wide"')
    assert text.count("currentColor") > 20, "figures follow the reader's colours"


@pytest.mark.full
def test_the_same_directory_gives_the_same_page_drawn_by_one_thread(
    single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (single / "report.html").read_bytes()
    threads: set[int] = set()
    true = report.of_run

    def of_run(found: Any, gallery: Any) -> Any:
        threads.update(pool["num_threads"] for pool in threadpool_info())
        return true(found, gallery)

    monkeypatch.setattr(report, "of_run", of_run)
    with threadpool_limits(limits=2):
        assert report.write(single) == single / "report.html"
    assert threads == {1}
    assert (single / "report.html").read_bytes() == before
    assert not list(single.glob(".*.part"))


@pytest.mark.full
def test_letters_of_charts_on_a_phone_have_ten_pixels(single: Path, several: Path) -> None:
    """Also without a browser: a point is 4/3 pixels where a chart is as wide as it was drawn."""
    for path in (single, several):
        text = (path / "report.html").read_text(encoding="utf-8")
        for chart in re.findall(r'<svg class="narrow".*?</svg>', text, flags=re.DOTALL):
            assert float(re.search(r'viewBox="0 0 ([\d.]+)', chart)[1]) / 72 <= 3.7  # type: ignore[index]
            sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", chart)]
            assert sizes and min(sizes) * 4 / 3 >= 10


def test_methods_have_their_titles_in_all_figures_and_tables(several: Path) -> None:
    text = (several / "report.html").read_text(encoding="utf-8")
    visible = text[: text.index('<section id="runs"')]
    assert re.findall(r"(?<![\w/-])(?:fedavg|cwfedavg)(?![\w-])", re.sub(r"<[^>]*>", " ", visible)) == []
    assert visible.count("cwFedAvg + WDR") > 10
    differing = text[text.index('<section id="reproduce"') :]
    assert "cwfedavg" not in re.sub(r"<(code|pre)>.*?</\1>|<[^>]*>", " ", differing, flags=re.DOTALL)
    assert (
        "fedapp compare --methods local,fedavg,cwfedavg --seeds 2" in differing
        and "author = {Lee and Choi}" in differing
    )


def test_the_majority_baseline_stands_once_and_by_name(single: Path, several: Path) -> None:
    data = read_comparison(several)
    (row,) = (r for r in page(several).rows if r and r[0] == "guessing the majority class")
    expected = np.mean([r.card["majority_mean"] for r in data.runs if r.method == "local"])
    assert row[1] == f"{100 * expected:.1f}" and set(row[2:]) == {"–", ""}
    assert page(single).said.count("Guessing the majority") == 1


# ---- what a run's page says ------------------------------------------------------------------------------------------


def test_headlines_and_tables_are_those_of_the_files(single: Path) -> None:
    found, data = page(single), read_run(single)
    for protocol in ("received", "trained", "global"):
        assert f"{100 * data.summary['accuracy'][protocol]['last']:.1f} %" in found.said
    rows = {r[0]: r for r in found.rows}
    scores = data.summary["accuracy"]["received"]
    expected = [scores["last"], scores["last_std"], data.summary["pooled"]["received"], scores["balanced"]]
    assert next(r for name, r in rows.items() if name.startswith("received:"))[1:5] == [
        f"{100 * v:.1f}" for v in expected
    ]
    clients = [r for r in found.rows if len(r) == 9 and r[1] == "digits-a"]
    assert len(clients) == 3
    for row, (_, client) in zip(clients, data.final.iterrows()):
        assert row[2] == f"{int(client['num_samples']):,}"
        assert row[4] == f"{100 * client['received_correct'] / client['received_total']:.1f}"
    up = rows["arrays that a client sends in a round"]
    assert up[1] == f"{data.summary['bytes_up']:,.0f}"
    for key in data.flat:
        assert key in rows, f"the configuration lacks {key}"
    assert data.card["hash"] in found.said
    assert "before: " in rows["calibration"][1]


def test_what_users_name_is_never_markup(single: Path, tmp_path: Path) -> None:
    path = copy(single, tmp_path / "odd")
    card = json.loads((path / "data_card.json").read_text())
    card["classes"][3] = '<script>alert("x")</script>&'
    (path / "data_card.json").write_text(json.dumps(card))
    summary = json.loads((path / "summary.json").read_text())
    summary["warnings"] = ["<img src=x onerror=alert(1)> & more"]
    (path / "summary.json").write_text(json.dumps(summary))
    report.write(path)
    found = page(path)
    assert found.tags["script"] == 1
    assert found.tags["img"] == 0
    assert '<script>alert("x")</script>&' in found.said
    assert "<img src=x onerror=alert(1)> & more" in found.said


@pytest.mark.usefixtures("no_figures")
def test_a_failed_run_says_so_first(single: Path, tmp_path: Path) -> None:
    path = copy(single, tmp_path / "broken")
    (path / "final.csv").unlink()
    (path / "summary.json").write_text(json.dumps({"ok": False, "error": "no space left"}))
    error = {"message": "no space left", "traceback": "Traceback: client 2\n  boom", "exit": 1, "client": 2, "round": 2}
    (path / "error.json").write_text(json.dumps({**error, "stage": "train"}))
    (path / "dropped.csv").write_text('round,client,stage,reason\n2,1,train,"shape (3,) is not (4,)"\n')
    report.write(path)
    found = page(path)
    assert "The run failed (client 2, round 2, train): no space left" in found.said
    assert "Traceback: client 2 boom" in found.said
    assert ["2", "1", "train", "shape (3,) is not (4,)"] in found.rows
    assert "1 replies did not count" in found.said


def test_a_run_that_only_began_has_a_page(single: Path, tmp_path: Path) -> None:
    path = tmp_path / "began"
    path.mkdir()
    for name in ("config.toml", "versions.json", "data_card.json"):
        shutil.copy(single / name, path / name)
    report.write(path)
    found = page(path)
    assert "The run is not finished" in found.said
    assert "Learning curves : no round was finished" in found.said
    assert "fedapp run --resume" in found.said


def test_a_configuration_of_another_version_still_has_a_page(single: Path, tmp_path: Path) -> None:
    path = copy(single, tmp_path / "old")
    with (path / "config.toml").open("a") as f:
        f.write('key-of-tomorrow = "x"\n')
    report.write(path)
    found = page(path)
    assert "unknown key 'key-of-tomorrow'" in found.said
    assert {"learning-curves", "labels-heat"} <= set(found.ids)


# ---- what a comparison's page says -----------------------------------------------------------------------------------


def test_the_tables_are_those_of_the_terminal(several: Path) -> None:
    found, data = page(several), read_comparison(several)
    (answer,) = answers.answers_of(data)
    shown = answers.screen(data, everything=True)
    assert all(sentence in found.said for sentence in [*answer.sentences().values(), answer.power()])
    for method, title in (("fedavg", "FedAvg *"), ("cwfedavg", "cwFedAvg + WDR")):
        runs = [r for r in data.runs if r.method == method]
        row = next(r for r in found.rows if r and r[0] == title)
        own = f"{100 * np.mean([r.score(r.headline) for r in runs]):.1f}"
        assert row[1] == own and answers.row_of(answer, method, title)[1:] == row[1:-1]
        line = next(line for line in shown.splitlines() if line.startswith(title) and own in line)
        assert all(cell in line for cell in row[1:4])
        spread = [r.summary["accuracy"]["trained"]["last"] for r in runs]
        assert f"{100 * np.mean(spread):.1f} ± {100 * np.std(spread, ddof=1):.1f}" in found.said
    assert [r[0] for r in found.rows[1:4]] == ["cwFedAvg + WDR", "FedAvg *", "Standalone"], "one order, alone last"
    assert sum(r[0].startswith("runs/") for r in found.rows if r) == 6
    ids = {
        "forest-headline",
        "clients-alone",
        "gain-by-rows",
        "traffic",
        "curves-difference",
        "curves-accuracy",
        "head-norms",
    }
    assert ids <= set(found.ids)
    assert "Recall by the share of a class : the runs kept no confusion matrices" in found.said


@pytest.mark.usefixtures("no_figures")
def test_a_folder_of_other_runs_has_a_page_without_an_answer(several: Path, tmp_path: Path) -> None:
    path = copy(several, tmp_path / "by-hand")
    for file in path.glob("*.csv"):
        file.unlink()
    report.write(path)
    found = page(path)
    assert "holds no comparison of this version" in found.said
    assert sum(r[0].startswith("runs/") for r in found.rows if r) == 6


@pytest.mark.usefixtures("no_figures")
def test_other_tables_of_a_comparison_are_shown(several: Path, tmp_path: Path) -> None:
    path = copy(several, tmp_path / "tables")
    (path / "by-hand.csv").write_text("a,b,p\nlocal,fedavg,0.03\n")
    report.write(path)
    found = page(path)
    assert ["local", "fedavg", "0.03"] in found.rows
    assert "By hand (1 rows)" in found.said


@pytest.mark.full
def test_a_method_that_failed_is_in_the_table_and_in_the_plot(tmp_path: Path) -> None:
    out = madeup.comparison(tmp_path, ["fedavg", "fedprox", "local", "lgfedavg"], failed=["fedprox"])
    report.write(out)
    found = page(out)
    row = next(r for r in found.rows if r and r[0] == "FedProx")
    assert row[-1] == "failed" and set(row[1:-1]) == {"–"}
    assert "FedProx failed (3 of 3 seeds): the loss is not finite" in found.said
    again = "the loss is not finite (the same command would fail in the same way)"
    assert [again, ", ".join(f"runs/fedprox-s{seed}" for seed in range(3))] in found.rows
    text = (out / "report.html").read_text(encoding="utf-8")
    plot = text[text.index('<figure id="forest-headline"') :]
    assert ">failed<" in plot[: plot.index("</figure>")]
    assert [r[0].removesuffix(" *") for r in found.rows[1:6]] == [
        "FedAvg", "FedProx", "LG-FedAvg", "Standalone", "Standalone again",
    ]  # fmt: skip


def test_one_seed_has_no_section_of_differences(tmp_path: Path) -> None:
    out = madeup.comparison(tmp_path, ["fedavg", "local"], seeds=1)
    text = report.write(out).read_text(encoding="utf-8")
    assert 'id="differences"' not in text and "Difference to training alone by round" not in text
    assert "one seed has no differences" in text
    comparison = read_comparison(out)
    (comparison.runs[0].out / "versions.json").unlink()
    assert "fedapp 0.0, Python 3" in report.of_comparison(read_comparison(out), Gallery()), "of the other run"
    (answer,) = answers.answers_of(comparison)
    assert not any("worst 10 %" in cells for _, cells in tables_of(answer, comparison.finished)), "ten clients"


def test_up_to_twelve_clients_with_names_have_their_own_scores(tmp_path: Path) -> None:
    out = madeup.comparison(tmp_path / "few", ["fedavg", "fedprox", "local"], clients=12)
    comparison = read_comparison(out)
    (answer,) = answers.answers_of(comparison)
    shown = {title.split(", mean")[0]: cells for title, cells in tables_of(answer, comparison.finished)}
    (found,) = (cells for title, cells in shown.items() if title.startswith("Clients by name, headline in %"))
    assert list(found) == [f"site {i}" for i in range(12)] and {*found.index} == {"fedavg", "fedprox", "local"}
    finals = [pd.read_csv(out / "runs" / f"fedprox-s{seed}" / "final.csv").set_index("client") for seed in range(3)]
    shares = [100 * final.loc[7, "received_correct"] / final.loc[7, "received_total"] for final in finals]
    alone = [pd.read_csv(out / "runs" / f"local-s{seed}" / "final.csv").set_index("client") for seed in range(3)]
    apart = [s - 100 * a.loc[7, "trained_correct"] / a.loc[7, "trained_total"] for s, a in zip(shares, alone)]
    told = f"{np.mean(shares):.1f} ± {np.std(shares, ddof=1):.1f}; {np.mean(apart):+.1f} ({sum(d > 0 for d in apart)})"
    assert found.loc["fedprox", "site 7"] == told and ";" not in found.loc["local", "site 7"]
    many = read_comparison(madeup.comparison(tmp_path / "many", ["fedavg", "local"], clients=13))
    assert not any("by name" in title for title, _ in tables_of(answers.answers_of(many)[0], many.finished))


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_page_and_figures(single: Path, tmp_path: Path) -> None:
    path = copy(single, tmp_path / "run")
    result = CliRunner().invoke(cli.app, ["report", str(path), "--figures", str(tmp_path / "figures")])
    assert result.exit_code == 0
    assert f"report: {path / 'report.html'}" in result.stdout
    names = {p.stem for p in (tmp_path / "figures").glob("*.png")}
    assert names == {p.stem for p in (tmp_path / "figures").glob("*.svg")} >= {"learning-curves", "labels-heat"}
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (tmp_path / "figures").glob("*.png"))


def test_a_folder_without_runs_is_a_bad_request(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="neither a run"):
        report.write(tmp_path)
    with pytest.raises(BadRequest, match="is not a folder"):
        report.write(Path(__file__))
    (tmp_path / "config.toml").write_text("method = ")
    with pytest.raises(BadRequest, match="cannot be read"):
        report.write(tmp_path)


def test_a_run_with_a_page_can_be_resumed(single: Path, tmp_path: Path) -> None:
    path = tmp_path / "again"
    shutil.copytree(single, path)
    assert (path / "report.html").is_file()
    assert run(resume=path, rounds=3).summary["rounds"] == 3
