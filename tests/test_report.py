"""The page of a run and of a comparison: whole, honest, self-contained, and readable in a real browser."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
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
    assert 2 * found.tags["figure"] == len(re.findall(r'role="img"', text)) >= 14, (
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
    differing = text[text.index('<section id="configuration"') :]
    assert "cwfedavg" not in re.sub(r"<code>.*?</code>|<[^>]*>", " ", differing[: differing.index("</section>")])


def test_the_majority_baseline_stands_once_and_by_name(single: Path, several: Path) -> None:
    data = read_comparison(several)
    rows = [r for r in page(several).rows if r and r[0] == "guessing the majority class"]
    by_seed = [r.card["majority_mean"] for r in data.runs if r.method == "local"]
    text = f"{100 * np.mean(by_seed):.1f} ± {100 * np.std(by_seed, ddof=1):.1f}"
    head = next(r for r in page(several).rows if r[0] == "accuracy in %")
    assert len(rows) == 1
    assert dict(zip(head[1:], rows[0][1:], strict=True)) == {
        c: text if c in ("trained", "received") else "–" for c in head[1:]
    }
    for path in (single, several):
        charts = re.findall(r'<svg class="wide".*?</svg>', (path / "report.html").read_text(), flags=re.DOTALL)
        assert sum("guessing each client's majority class" in re.sub("<title.*?</title>", "", c) for c in charts) == 1
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
        headline = expected[0 if method == "local" else 1]
        if method == "local":  # receives nothing
            expected[1] = expected[3] = "–"
        assert row[1:6] == [headline, *expected]
        worst = [r.final["trained_accuracy"].min() for r in data.runs if r.method == method]
        further = [r for r in found.rows if r and r[0] == title][1]
        assert further[1] == f"{100 * np.mean(worst):.1f} ± {100 * np.std(worst, ddof=1):.1f}"
    assert "Standalone receives nothing, so it has one score" in found.said
    assert "standard deviation over 2 seeds, each with a partition of its own." in found.said
    assert "received: before local training; trained: after local training" in found.said
    assert sum(r[0].startswith("runs/") for r in found.rows if r) == 6
    assert {"curves-accuracy", "traffic", "head-norms", "labels-dots"} <= set(found.ids)


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
    row = "digits,dirichlet,%s,,trained_accuracy,fedprox(mu=0.1 lr=0.1),local,%s\n"
    (tmp_path / "significance.csv").write_text(
        "dataset,partition,alpha,classes_per_client,measure,variant,reference,seeds,by_seed,mean_difference,low,high,word\n"
        + row % (0.3, '2,"[0.01, 0.0146]",0.0123,-0.02,0.04,open')
        + row % (2.0, '3,"[-0.1, -0.2, -0.3]",-0.2,-0.4,-0.05,worse')
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
    assert ["FedProx (mu=0.1 lr=0.1)", "+1.0 and +1.5"] in found.rows
    assert ["FedProx (mu=0.1 lr=0.1)", "-20.0 (-40.0 to -5.0), worse"] in found.rows
    assert "Alpha 0.3" in found.said and "Alpha 2.0" in found.said


@pytest.mark.usefixtures("no_figures")
def test_runs_that_failed_are_named_and_not_counted(several: Path, tmp_path: Path) -> None:
    path = copy(several, tmp_path / "partly")
    broken = path / "runs" / "fedavg-s1"
    (broken / "summary.json").write_text(json.dumps({"ok": False, "error": "killed"}))
    (broken / "error.json").write_text(json.dumps({"message": "killed"}))
    report.write(path)
    found, data = page(path), read_comparison(path)
    assert "1 of 6 runs failed or are not finished" in found.said
    assert "runs/fedavg-s1: killed" in found.said
    only = next(r for r in data.runs if r.out.name == "fedavg-s0").summary["accuracy"]["received"]["last"]
    assert next(r for r in found.rows if r and r[0] == "FedAvg")[1] == f"{100 * only:.1f}"
    assert ["killed", "runs/fedavg-s1"] in found.rows
    shutil.rmtree(path / "runs" / "fedavg-s0")
    report.write(path)
    row = next(r for r in page(path).rows if r and r[0] == "FedAvg")
    assert row[1] == "failed" and set(row[2:]) == {"–"}, "a method without a finished run has its row"


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

SEEN = """() => {
  document.querySelectorAll('details').forEach(d => d.open = true);
  const parse = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const shine = c => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) => {
    const v = c[i] / 255;
    return sum + part * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  }, 0.05);
  const paper = node => {
    for (; node; node = node.parentElement) {
      const c = parse(getComputedStyle(node).backgroundColor);
      if (c.length === 3 || c[3] > 0) return c;
    }
    return parse(getComputedStyle(document.body).backgroundColor);
  };
  const faint = [], small = [];
  let texts = 0, charts = 0;
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || node.tagName === 'title' || !node.getClientRects().length) continue;
    const chart = node.closest('svg'), style = getComputedStyle(node), here = node.getBoundingClientRect();
    if (chart) {
      charts += 1;
      const size = parseFloat(style.fontSize) * chart.getBoundingClientRect().width / chart.viewBox.baseVal.width;
      if (size < 10) small.push([size, node.textContent]);
      const x = here.left + here.width / 2, y = here.top + here.height / 2;
      const inside = r => r.left < x && x < r.right && r.top < y && y < r.bottom;
      if ([...chart.querySelectorAll('.heat')].some(h => inside(h.getBoundingClientRect()))) continue;
    }
    texts += 1;
    const a = shine(parse(chart ? style.fill : style.color)), b = shine(paper(node));
    const ratio = Math.max(a, b) / Math.min(a, b);
    if (ratio < 4.5) faint.push([ratio, node.textContent.slice(0, 40)]);
  }
  const images = [...document.querySelectorAll('svg[role=img], img')].filter(i => i.getClientRects().length);
  const cut = [...document.querySelectorAll('svg text')].filter(t => {
    const r = t.getBoundingClientRect(), c = t.closest('svg').getBoundingClientRect();
    return t.getClientRects().length && (r.left < c.left - 2 || r.right > c.right + 2);
  });
  return {
    width: document.documentElement.scrollWidth, faint, small, texts, charts, images: images.length,
    unnamed: images.filter(
      i => !(i.alt || document.getElementById(i.getAttribute('aria-labelledby'))?.textContent)).length,
    cut: cut.map(t => t.textContent), paper: getComputedStyle(document.body).backgroundColor,
    boxes: [...document.querySelectorAll('.table')].filter(t => t.scrollWidth > t.clientWidth + 1).length,
  };
}"""
"""What a reader sees: texts with a contrast below WCAG's 4.5 to 1, texts of charts below ten pixels, images unnamed."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="no Playwright (pip install playwright)")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    if (program := next((p for n in names if (p := shutil.which(n))), None)) is None:
        pytest.skip("no Chromium (apt-get install chromium)")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def whole(single: Path, several: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both pages with all their figures."""
    pages = {}
    for name, path in (("single", single), ("several", several)):
        pages[name] = tmp_path_factory.mktemp("whole") / name
        shutil.copytree(path, pages[name])
        report.write(pages[name])
    return pages


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["single", "several"])
def test_the_page_reads_well_offline_in_chromium(
    which: str, scheme: str, width: int, whole: dict[str, Path], chromium: Any
) -> None:
    shown = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    said: list[str] = []
    shown.on("console", lambda message: said.append(message.text))
    shown.on("requestfailed", lambda request: said.append(request.url))
    shown.goto((whole[which] / "report.html").as_uri())
    seen = shown.evaluate(SEEN)
    shown.close()
    assert said == []
    assert seen["width"] == width, "nothing but tables scrolls sideways"
    assert seen["paper"] == ("rgb(21, 23, 26)" if scheme == "dark" else "rgb(255, 255, 255)")
    assert seen["texts"] > 300 and seen["charts"] > 150 and seen["images"] >= 7
    assert seen["faint"] == [] and seen["unnamed"] == 0 and seen["cut"] == []
    if width == 390:
        assert seen["small"] == [] and seen["boxes"] > 2, "wide tables scroll inside their boxes"
