"""The pages in a real Chromium: offline, under their content policy, on a phone, in the dark, by keyboard, on paper."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from fedapp import registry
from fedapp.results import report
from tests import madeup

TEN = ["fedclassavg", "cwfedavg", "fedgh", "ccvr", "fedavg", "fedprox", "lgfedavg", "fedper", "ditto", "local"]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    program = next((p for n in names if (p := shutil.which(n))), None)
    assert program is not None, "these tests need Chromium: apt-get install chromium"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of ten methods, of which one diverged; a run has a page too."""
    out = madeup.comparison(tmp_path_factory.mktemp("browser") / "ten", TEN, failed=["fedprox"])
    report.write(out / "runs" / "fedavg-s0")
    return report.write(out)


@pytest.fixture(scope="module")
def single(ten: Path) -> Path:
    """The page of one run, written when its comparison has one."""
    return report.write(ten.parent / "runs" / "fedclassavg-s0")


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


def opened(chromium: Any, path: Path, width: int = 1280, scheme: str = "light", **more: Any) -> tuple[Any, list[str]]:
    """A page, and what its console says and its network refuses."""
    shown = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True, **more)
    said: list[str] = []
    shown.on("console", lambda message: said.append(message.text))
    shown.on("pageerror", lambda error: said.append(str(error)))
    shown.on("request", lambda request: said.append(request.url) if request.url != path.as_uri() else None)
    shown.goto(path.as_uri())
    return shown, said


@pytest.mark.full
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["single", "ten"])
def test_a_page_reads_well_and_loads_nothing(
    which: str, scheme: str, width: int, chromium: Any, request: pytest.FixtureRequest
) -> None:
    shown, said = opened(chromium, request.getfixturevalue(which), width, scheme)
    shown.evaluate("document.querySelectorAll('figure[hidden]').forEach(f => f.hidden = false)")
    seen = shown.evaluate(SEEN)
    shown.close()
    assert said == []
    assert seen["width"] == width, "nothing but tables scrolls sideways"
    assert seen["paper"] == ("rgb(21, 23, 26)" if scheme == "dark" else "rgb(255, 255, 255)")
    assert seen["texts"] > 300 and seen["charts"] > 100 and seen["images"] >= 5
    assert seen["faint"] == [] and seen["unnamed"] == 0 and seen["cut"] == []
    if width == 390:
        assert seen["small"] == [] and seen["boxes"] > 2, "wide tables scroll inside their boxes"


@pytest.mark.full
def test_a_keyboard_skips_sorts_and_switches(ten: Path, chromium: Any) -> None:
    shown, said = opened(chromium, ten)
    shown.keyboard.press("Tab")
    skip = shown.locator(":focus")
    assert skip.get_attribute("class") == "skip" and skip.bounding_box()["x"] >= 0
    shown.keyboard.press("Enter")
    shown.keyboard.press("Tab")
    first = shown.locator(":focus")
    assert first.inner_text() == "Own test rows" and first.get_attribute("aria-pressed") == "true"
    assert float(shown.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)")) >= 2
    shown.keyboard.press("Tab")
    shown.keyboard.press("Space")
    visible = shown.locator("#differences figure:visible h3").all_text_contents()
    assert visible == ["All classes"]

    heads = shown.locator("#scores table").first.locator("thead th")
    rows = shown.locator("#scores table").first.locator("tbody tr")
    before = rows.locator("th").all_text_contents()
    titles = [registry.method_title(m) for m in TEN]
    assert [name.removesuffix(" *") for name in before[: len(TEN)]] == titles, "the order of the call"
    heads.nth(1).locator("button").focus()
    shown.keyboard.press("Enter")
    own = [float(text) for text in rows.locator("td:nth-child(2)").all_text_contents() if text != "–"]
    assert own == sorted(own, reverse=True) and heads.nth(1).get_attribute("aria-sort") == "descending"
    assert rows.last.locator("td").first.inner_text() == "–", "what was not measured stands last"
    shown.keyboard.press("Enter")
    own = [float(text) for text in rows.locator("td:nth-child(2)").all_text_contents() if text != "–"]
    assert own == sorted(own) and heads.nth(1).get_attribute("aria-sort") == "ascending"
    sent = next(i for i, text in enumerate(heads.all_text_contents()) if text == "up/round")
    heads.nth(sent).locator("button").press("Enter")
    found = rows.locator(f"td:nth-child({sent + 1})").all_text_contents()
    units = {"B": 1, "kB": 1e3, "MB": 1e6}
    sizes = [float(n.replace(",", "")) * units[u] for n, u in (text.split() for text in found if text != "–")]
    assert sizes == sorted(sizes, reverse=True), "sizes are sorted as numbers of bytes"
    shown.close()
    assert said == []


@pytest.mark.full
def test_without_a_script_everything_reads(ten: Path, chromium: Any) -> None:
    shown, _ = opened(chromium, ten, java_script_enabled=False)
    figures = shown.locator("#differences figure")
    assert figures.count() == 2 and all(figures.nth(i).is_visible() for i in range(2))
    assert shown.locator("button").count() == 0
    shown.close()


@pytest.mark.full
def test_only_the_script_of_the_page_may_run(ten: Path, chromium: Any) -> None:
    shown, said = opened(chromium, ten)
    shown.evaluate("""() => {
      const other = document.createElement("script");
      other.textContent = "window.ran = true";
      document.body.append(other);
    }""")
    assert shown.evaluate("window.ran") is None
    shown.close()
    assert len(said) == 1 and "Content Security Policy" in said[0]


@pytest.mark.full
@pytest.mark.parametrize("clients", [10, 30, 100])
def test_ten_methods_print_on_two_sheets(clients: int, ten: Path, tmp_path: Path, chromium: Any) -> None:
    page = ten if clients == 10 else report.write(madeup.comparison(tmp_path / "more", TEN, clients=clients))
    shown, _ = opened(chromium, page)
    paper = shown.pdf(prefer_css_page_size=True)
    shown.close()
    assert len(re.findall(rb"/Type\s*/Page\b", paper)) == 2


@pytest.mark.full
def test_marks_have_texts_and_links_lead_there_and_back(ten: Path, single: Path, chromium: Any) -> None:
    shown, _ = opened(chromium, ten)
    texts = shown.locator("#clients use title").all_text_contents()
    assert any(re.fullmatch(r"client 3 \(site 3\): .* alone, .* with FedClassAvg, .*training rows", t) for t in texts)
    shown.locator("#runs summary").click()
    shown.get_by_text("runs/fedavg-s0", exact=True).click()
    assert shown.title().startswith("FedAvg on digits")
    shown.goto(single.as_uri())
    shown.get_by_text("its comparison").click()
    assert shown.title().startswith("9 methods on digits")
    shown.close()


@pytest.mark.slow
def test_a_large_comparison_has_a_page_of_3_megabytes(tmp_path: Path) -> None:
    """All methods, 5 seeds, 100 clients."""
    out = madeup.comparison(tmp_path / "large", list(registry.discover()), seeds=5, clients=100, rounds=20)
    assert report.write(out).stat().st_size < 3e6


def test_a_chosen_method_stands_out_in_charts_and_tables_and_seeds_are_chosen(ten: Path, chromium: Any) -> None:
    page = chromium.new_page()
    page.goto(ten.as_uri())
    faded = "() => [...document.querySelectorAll('[data-method]')].map(m => [m.dataset.method, m.style.opacity])"
    assert {opacity for _, opacity in page.evaluate(faded)} == {""}
    names = page.eval_on_selector_all("#highlight option", "options => options.map(o => o.textContent)")
    assert names == ["all methods", *(registry.title_of(v) for v in TEN)]
    page.select_option("#highlight", label=names[2])
    found = page.evaluate(faded)
    assert {opacity for method, opacity in found if method == "1"} == {""}
    assert {opacity for method, opacity in found if method != "1"} == {"0.12"}
    own = page.evaluate("() => [...document.querySelectorAll('[data-method=\"1\"]')].map(m => m.closest('section').id)")
    assert {"differences", "bytes", "curves"} <= set(own)
    strong = page.eval_on_selector_all("#scores tr.strong th", "heads => heads.map(h => h.textContent)")
    assert strong and {name.removesuffix(" *") for name in strong} == {names[2]}
    page.select_option("#highlight", label="all methods")
    assert {opacity for _, opacity in page.evaluate(faded)} == {""}
    seeds = page.get_by_role("group", name="Seed").get_by_role("button")
    seeds.nth(1).click()
    shown = page.eval_on_selector_all("#data figure:not([hidden])", "figures => figures.map(f => f.id)")
    assert seeds.count() > 1 and shown == ["labels-heat-s1"]
    page.close()
