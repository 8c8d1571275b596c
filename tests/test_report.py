"""The page of a run and of a comparison: whole, honest, self-contained, and readable in a real browser."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits
from typer.testing import CliRunner

from fedapp import cli
from fedapp.engines.local import run
from fedapp.errors import BadRequest
from fedapp.results import report
from fedapp.results.figures import gallery, plots, store, style
from fedapp.results.runs import read_comparison, read_run

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
    report.write(out)
    return out


def page(path: Path) -> Page:
    return Page((path / "report.html").read_text(encoding="utf-8"))


def copy(path: Path, to: Path) -> Path:
    """Copy directories without page and clients' states: nothing is computed from models then, which is quick."""
    shutil.copytree(path, to, ignore=shutil.ignore_patterns("report.html", "state", "checkpoint", "models"))
    return to


# ---- whole and self-contained ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["single", "several"])
def test_the_page_is_whole_and_loads_nothing(which: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(which)
    text = (path / "report.html").read_text(encoding="utf-8")
    found = Page(text)
    assert text.startswith("<!doctype html>")
    assert "default-src 'none'" in text
    assert found.tags["script"] == found.tags["link"] == found.tags["iframe"] == 0
    assert [i for i, n in Counter(found.ids).items() if n > 1] == []
    for reference in found.links:
        assert reference.startswith("#"), reference
        assert reference[1:] in found.ids, f"{reference} leads nowhere"
    for resource in found.resources:
        assert resource.startswith("data:image/png;base64,") or resource[1:] in found.ids, resource[:80]
    for reference in re.findall(r"url\(([^)]*)\)", text):
        assert reference.startswith("#")
    assert "@import" not in text
    assert found.unnamed == []
    assert found.tags["figure"] == len(re.findall(r'role="img"', text)) >= 9
    assert text.count("currentColor") > 20, "figures follow the reader's colours"


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
        assert report.write(single, fresh=True) == single / "report.html"
    assert threads == {1}
    assert (single / "report.html").read_bytes() == before
    report.write(single)
    assert (single / "report.html").read_bytes() == before, "stored figures are the same"
    assert not list(single.glob(".*.part"))


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of figures that is still empty."""
    monkeypatch.setattr(store, "cache_root", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "figures"


def test_slow_figures_are_drawn_when_asked_for_and_shown_when_known(
    single: Path, own_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gallery.FIGURES, "samples-sweep", gallery.FIGURES["cka"])  # in place of seconds of training
    monkeypatch.setattr(gallery, "SLOW", ("cka", "samples-sweep"))
    kept = {k: v for k, v in gallery.FIGURES.items() if k in ("learning-curves", "cka", "samples-sweep")}
    monkeypatch.setattr(gallery, "FIGURES", kept)
    said: list[tuple[int, int, str]] = []

    def ids(**options: Any) -> set[str]:
        report.write(single, **options)
        return set(page(single).ids) & set(kept)

    before = (single / "report.html").read_bytes()
    try:
        assert ids(progress=lambda *what: said.append(what)) == {"learning-curves"}
        assert said == [(i, 3, kept[name][1]) for i, name in enumerate(kept, 1)]
        assert "Similarity of clients by layer; Similarity of clients by layer : they run models" in page(single).said
        assert "fedapp report DIR --all" in page(single).said
        assert ids(everything=True) == set(kept)
        drawn: list[str] = []
        for name, (section, title, source, draw) in kept.items():
            monkeypatch.setitem(
                kept, name, (section, title, source, lambda runs, n=name, d=draw: (drawn.append(n), d(runs))[1])
            )
        assert ids() == set(kept) and drawn == [], "known figures are shown without being drawn"
        assert ids(everything=True, fresh=True) == set(kept) and drawn == list(kept)
    finally:
        (single / "report.html").write_bytes(before)


def test_a_figure_is_drawn_again_when_what_it_shows_has_changed(
    single: Path, own_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    shutil.copytree(single, path)
    keys = [store.Store().key([read_run(path)], "x")]
    assert store.Store().key([read_run(path)], "x") == keys[0]
    with (path / "rounds.csv").open("a") as f:
        f.write("\n")
    keys.append(store.Store().key([read_run(path)], "x"))
    shutil.rmtree(path / "state" / "run" / "2")
    keys.append(store.Store().key([read_run(path)], "x"))
    keys.append(store.Store().key([read_run(path)], "y"))
    keys.append(store.Store().key([dataclasses.replace(read_run(path), label="other")], "x"))
    with style.one_look_each(["other", "ccvr"]):
        keys.append(store.Store().key([read_run(path)], "x"))
    monkeypatch.setattr(store, "code", lambda: "of tomorrow")
    keys.append(store.Store().key([read_run(path)], "x"))
    assert len(set(keys)) == len(keys)


def test_the_store_keeps_what_was_used_last_and_survives_damage(
    own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = style.Drawing("a", "t", "c", "alt", plots.curves({"": [plots.Curve("x", np.arange(3.0), np.ones(3))]}))
    kept = store.Store()
    assert kept.read("one") is None
    for i, key in enumerate(("one", "two", "three")):
        kept.keep(key, [drawn])
        os.utime(own_store / f"{key}.json", (i, i))
    found = kept.read("one")  # which makes it the newest
    assert found is not None and found[0].alt == "alt" and found[0].inline().startswith("<svg")
    monkeypatch.setattr(store, "MOST_BYTES", 2 * (own_store / "one.json").stat().st_size)
    kept.tidy()
    assert {p.stem for p in own_store.iterdir()} == {"one", "three"}
    (own_store / "three.json").write_text('[{"id": "a"')
    assert kept.read("three") is None
    shutil.rmtree(own_store)
    own_store.write_text("no folder")
    kept.keep("one", [drawn])  # a page needs no store


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
    assert found.tags["script"] == 0
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


def test_the_table_is_mean_and_spread_over_seeds(several: Path) -> None:
    found, data = page(several), read_comparison(several)
    for method, title in (("local", "Standalone"), ("fedavg", "FedAvg")):
        scores = [
            [r.summary["accuracy"][p][n] for r in data.runs if r.method == method]
            for p, n in (("trained", "last"), ("received", "last"), ("trained", "balanced"), ("received", "balanced"))
        ]
        row = next(r for r in found.rows if r and r[0] == title)
        expected = [f"{100 * np.mean(s):.1f} ± {100 * np.std(s, ddof=1):.1f}" for s in scores]
        if method == "local":  # receives nothing
            expected[1] = expected[3] = "–"
        assert row[1:5] == expected
        worst = [r.final["trained_accuracy"].min() for r in data.runs if r.method == method]
        further = [r for r in found.rows if r and r[0] == title][1]
        assert further[1] == f"{100 * np.mean(worst):.1f} ± {100 * np.std(worst, ddof=1):.1f}"
    assert "Standalone receives nothing, so it has one score" in found.said
    assert "standard deviation over 2 seeds, each with a partition of its own." in found.said
    assert "received: before local training; trained: after local training" in found.said
    assert sum(r[0].startswith("runs/") for r in found.rows if r) == 6
    assert {"curves-accuracy", "traffic", "head-norms", "p-against-norms"} <= set(found.ids)


@pytest.mark.usefixtures("no_figures")
def test_other_tables_of_a_comparison_are_shown(several: Path, tmp_path: Path) -> None:
    path = copy(several, tmp_path / "tables")
    (path / "by-hand.csv").write_text("a,b,p\nlocal,fedavg,0.03\n")
    report.write(path)
    found = page(path)
    assert ["local", "fedavg", "0.03"] in found.rows
    assert "By hand (1 rows)" in found.said


@pytest.mark.usefixtures("no_figures")
def test_what_compare_counted_and_tested_is_shown_per_setting(tmp_path: Path) -> None:
    """Variants of a method are told apart, settings have tables of their own, and its further tables are read."""
    base = {**SMALL, "rounds": 1, "batch_size": 64, "partition": "dirichlet"}
    for alpha in (0.3, 2.0):
        for name, more in (("local", {}), ("fedprox-mu=0.1-lr=0.1", {"method_args": "mu=0.1", "lr": 0.1}),
                           ("fedprox-mu=0.1-lr=0.2", {"method_args": "mu=0.1", "lr": 0.2})):  # fmt: skip
            out = tmp_path / "runs" / f"digits-dirichlet-{alpha:g}" / f"{name}-s0"
            run(**{**base, "method": name.split("-")[0], "alpha": alpha, "out": out, **more})
            shutil.rmtree(out / "state")
    head = "method,variant,dataset,partition,alpha,classes_per_client,seed,trained_target,trained_target_rounds,"
    rows = [
        f"{m},{v},digits,dirichlet,{a},,0,0.9,{reached}"
        for a in (0.3, 2.0)
        for m, v, reached in (
            ("local", "local", "4,0"), ("fedprox", "fedprox(mu=0.1 lr=0.1)", f"{2 * a},1000000"),
            ("fedprox", "fedprox(mu=0.1 lr=0.2)", ","),
        )
    ]  # fmt: skip
    (tmp_path / "results.csv").write_text("\n".join([head + "trained_target_bytes", *rows]) + "\n")
    (tmp_path / "significance.csv").write_text(
        "dataset,partition,alpha,classes_per_client,measure,variant,reference,mean_difference,std_over_seeds,p_holm\n"
        "digits,dirichlet,0.3,,trained_accuracy,fedprox(mu=0.1 lr=0.1),local,0.0123,,0.04\n"
        "digits,dirichlet,2.0,,trained_accuracy,fedprox(mu=0.1 lr=0.1),local,-0.2,0.31,0.0002\n"
    )
    found, data = (report.write(tmp_path), page(tmp_path))[1], read_comparison(tmp_path)
    assert data.labels == ("local", "fedprox(mu=0.1 lr=0.1)", "fedprox(mu=0.1 lr=0.2)")
    assert {(r.label, r.flat["lr"]) for r in data.runs if r.method == "fedprox"} == {
        ("fedprox(mu=0.1 lr=0.1)", 0.1), ("fedprox(mu=0.1 lr=0.2)", 0.2),
    }  # fmt: skip
    first, second = (i for i, r in enumerate(found.rows) if r[0] == "cost")
    assert [r[:3] for r in found.rows[first : first + 4]] == [
        ["cost", "completed rounds to 90.0 %", "traffic of these"],
        ["Standalone", "4.0", "0 B"],
        ["FedProx (mu=0.1 lr=0.1)", "0.6", "1.0 MB"],
        ["FedProx (mu=0.1 lr=0.2)", "never", "–"],
    ]
    assert found.rows[second + 2][:3] == ["FedProx (mu=0.1 lr=0.1)", "4.0", "1.0 MB"]
    assert ["fedprox(mu=0.1 lr=0.1)", "+1.2, p = 0.040"] in found.rows
    assert ["fedprox(mu=0.1 lr=0.1)", "-20.0 ± 31.0, p < 0.001"] in found.rows
    assert "Alpha 0.3" in found.said and "Alpha 2.0" in found.said


@pytest.mark.usefixtures("no_figures")
def test_runs_that_failed_are_named_and_not_counted(several: Path, tmp_path: Path) -> None:
    path = copy(several, tmp_path / "partly")
    broken = path / "runs" / "fedavg-s1"
    (broken / "summary.json").write_text(json.dumps({"ok": False, "error": "killed"}))
    (broken / "error.json").write_text(json.dumps({"message": "killed"}))
    report.write(path)
    found, data = page(path), read_comparison(path)
    assert "1 of 6 runs are not finished and are not counted: runs/fedavg-s1." in found.said
    only = next(r for r in data.runs if r.out.name == "fedavg-s0").summary["accuracy"]["trained"]["last"]
    assert next(r for r in found.rows if r and r[0] == "FedAvg")[1] == f"{100 * only:.1f}"
    assert ["killed", "runs/fedavg-s1"] in found.rows


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
        report.write(tmp_path / "nothing")
    (tmp_path / "config.toml").write_text("method = ")
    with pytest.raises(BadRequest, match="cannot be read"):
        report.write(tmp_path)


def test_a_run_with_a_page_can_be_resumed(single: Path, tmp_path: Path) -> None:
    path = tmp_path / "again"
    shutil.copytree(single, path)
    assert (path / "report.html").is_file()
    assert run(resume=path, rounds=3).summary["rounds"] == 3


# ---- in a browser ----------------------------------------------------------------------------------------------------


def browser() -> str:
    found = next(
        (p for n in ("chromium", "chromium-browser", "google-chrome", "chrome") if (p := shutil.which(n))), None
    )
    if found is None:
        pytest.skip("no Chromium (apt-get install chromium)")
    return found


def shoot(path: Path, to: Path, *flags: str, size: str = "1000,3000") -> tuple[np.ndarray[Any, Any], str]:
    """Open a page offline in headless Chromium: its pixels (H, W, 3), and what the browser complained about."""
    from PIL import Image

    command = [
        browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
        "--force-device-scale-factor=1", "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={to.parent / 'p'}",
        f"--window-size={size}", *flags, f"--screenshot={to}", (path / "report.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    said = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line or "Refused" in line)
    return np.asarray(Image.open(to).convert("RGB")), said


@pytest.mark.slow
@pytest.mark.parametrize("which", ["single", "several"])
def test_the_page_opens_offline_in_chromium(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path: Path = request.getfixturevalue(which)
    pixels, complaints = shoot(path, tmp_path / "light.png")
    assert complaints == ""
    assert pixels.shape == (3000, 1000, 3)
    assert (pixels[:, 0] == 255).all(), "white paper"
    ink = pixels.min(axis=2) < 100
    assert 0.005 < ink.mean() < 0.4, "text and figures are there"
    blue = (pixels[..., 2].astype(int) - pixels[..., 0] > 60).mean()
    assert blue > 0.001, "figures are drawn in colour"
    assert not ink[:, 950:].any(), "nothing runs over the right margin"


@pytest.mark.slow
def test_the_page_follows_a_dark_scheme_and_fits_a_phone(single: Path, tmp_path: Path) -> None:
    dark, complaints = shoot(single, tmp_path / "dark.png", "--blink-settings=preferredColorScheme=0")
    assert complaints == ""
    assert (dark[:, 0] == (0x15, 0x17, 0x1A)).all()
    assert (dark.min(axis=2) > 190).mean() > 0.003, "light text and axes"
    phone, _ = shoot(single, tmp_path / "phone.png", size="500,4000")
    assert (phone[:, 480:] >= 250).mean() > 0.97, "tables scroll inside the page, which is not wider than the screen"
