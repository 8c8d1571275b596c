"""Links between the pages lead to files and headings that exist; pages that are made hold all keys and commands."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest
import typer
from markdown_it import MarkdownIt
from markdown_it.token import Token

from fedapp import cli, config, registry
from fedapp.bodies import known
from fedapp.cli import listing
from tests import site_pages
from tests.readme import ROOT
from tests.site_text import folded, relinked, rewritten
from tools import phrases

DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
MARKDOWN = MarkdownIt("commonmark").enable("table")


@cache
def tokens(page: Path) -> list[Token]:
    return MARKDOWN.parse(page.read_text(encoding="utf-8"))


def slug(heading: str) -> str:
    """The anchor that code hosts and the site give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> set[str]:
    """All anchors of a page: those of its headings, numbered where one repeats, and those set in HTML."""
    found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", page.read_text(encoding="utf-8")))
    seen: Counter[str] = Counter()
    for opening, inline in zip(tokens(page), tokens(page)[1:]):
        if opening.type == "heading_open":
            name = slug("".join(t.content for t in inline.children or () if t.type in ("text", "code_inline")))
            found.add(f"{name}-{seen[name]}" if seen[name] else name)
            seen[name] += 1
    return found


def targets(page: Path) -> list[str]:
    """Where the links and the images of a page point to."""
    inner = [t for token in tokens(page) for t in token.children or ()]
    found = [str(t.attrs["href"]) for t in inner if t.type == "link_open"]
    return found + [str(t.attrs["src"]) for t in inner if t.type == "image"]


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    found = []
    for target in targets(page):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = target.partition("#")
        file = (page.parent / unquote(place)).resolve() if place else page
        if not file.is_relative_to(ROOT) or not file.exists():
            found.append(f"{target}: no such file")
        elif anchor and (file.suffix != ".md" or unquote(anchor) not in anchors(file)):
            found.append(f"{target}: no such heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_the_checker_finds_what_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_pages.ROOT", tmp_path)
    (tmp_path / "b.md").write_text("# A `b`, c!\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "a.md"
    good = ["b.md", "b.md#a-b-c", "b.md#twice", "b.md#twice-1", "https://example.org/none"]
    bad = ["c.md", "b.md#c", "b.md#twice-2", "#none", "../b.md"]
    page.write_text(
        "# A\n\n" + "\n".join(f"[x]({t})" for t in good + bad) + "\n\n![x](no.png)\n\n```\n[x](code.md)\n```\n"
    )
    assert [text.split(": ")[0] for text in broken(page)] == [*bad, "no.png"]


def test_the_site_shows_every_page() -> None:
    """A page that the navigation leaves out is found by nobody."""

    def places(node: object) -> list[str]:
        if isinstance(node, str):
            return [node]
        return [p for inner in (node.values() if isinstance(node, dict) else node) for p in places(inner)]  # type: ignore[attr-defined]

    shown = places(site_pages.navigation())
    assert len(shown) == len(set(shown))
    written = {str(p.relative_to(DOCS)) for p in PAGES if p.is_relative_to(DOCS)}
    written |= {str(p.relative_to(ROOT)) for p in ROOT.glob("*.md")} - {"README.md"}
    assert set(shown) | site_pages.LINKED == written | set(site_pages.generated())
    linked = {t.rpartition("/")[2] for page in PAGES for t in targets(page)}
    assert site_pages.LINKED.isdisjoint(shown) and linked >= site_pages.LINKED


def test_every_key_is_on_its_page_once() -> None:
    page = site_pages.keys()
    assert sorted(re.findall(r"^\| `([\w-]+)`\{ #key-", page, flags=re.M)) == sorted(config.KEYS)
    assert [title.lower() for title in re.findall(r"^## (.+)$", page, flags=re.M)] == list(config.GROUPS)


def test_types_and_defaults_are_those_of_the_class() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)`\{ #key-[\w-]+ \} \| (.+)$", site_pages.keys(), flags=re.M))
    assert rows["lr"] == "`auto`, or number, above 0 | `auto` | learning rate |"
    assert rows["seed"].startswith("whole number, at least 0 and at most 2,147,483,647 | `0` |")
    assert rows["resume"].startswith("`true`, `false` | `false` |")
    assert rows["wire-dtype"].startswith("`fp32`, `fp16` | `fp32` |")
    assert rows["out"].startswith("text | empty |")
    for name, row in rows.items():
        assert " ".join(row.rstrip(" |").rpartition(" | ")[2].split()), f"{name} has no meaning"


def test_every_hyperparameter_is_on_its_page() -> None:
    page = site_pages.hyperparameters()
    for m in registry.discover().values():
        assert re.findall(rf"\{{ #{m.id}-(\w+) \}}", page) == list(m.hparams.model_fields)


def test_every_command_is_on_its_page_with_each_option_and_a_meaning() -> None:
    page = site_pages.commands()
    group = typer.main.get_command(cli.app)
    for name in group.commands:  # type: ignore[attr-defined]
        assert re.search(rf"^## fedapp {name}\b", page, flags=re.M)
    for option in ("--client-gpus", "--root-certificates", "--token-file", "--max-examples"):
        assert f"| `{option}` |" in page
    assert not re.findall(r"^\| `[^`]+` \|.*\|  \|$", page, flags=re.M), "an option without a meaning"
    assert "TOML file of run-config keys" in page


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## (.+)$", text, flags=re.M)
    assert heads[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - (\d{4}-\d\d-\d\d|not published)", head) for head in heads[1:])
    kinds = set(re.findall(r"^### (.+)$", text, flags=re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_links_of_the_repository_become_links_of_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDAPP_REPOSITORY", raising=False)
    text = "[a](docs/scores.md#x) [b](LICENSE) [c](strategies/base.py) [d](docs/methods) [e](https://example.org)"
    assert relinked(text, "", "index.md") == (
        "[a](scores.md#x) b [c](api/strategies.base.md) [d](methods/index.md) [e](https://example.org)"
    )
    assert relinked("[f](../../CONTRIBUTING.md) [g](fedper.md)", "docs/methods", "methods/cfl.md") == (
        "[f](../CONTRIBUTING.md) [g](fedper.md)"
    )
    assert relinked("[c](../clients/scaffold.py)\n```\n[b](LICENSE)\n```", "docs", "a.md") == (
        "[c](api/scaffold.md)\n```\n[b](LICENSE)\n```"
    )
    monkeypatch.setenv("FEDAPP_REPOSITORY", "https://example.org/fedapp/")
    assert relinked("[b](LICENSE)", "", "index.md") == "[b](https://example.org/fedapp/blob/HEAD/LICENSE)"


def test_docstrings_become_what_numpydoc_and_markdown_read() -> None:
    text = (
        "Sum.\n\n    W = A b\n\n==  ===\na   one\n    two\n==  ===\n\nSee :func:`x`.\n\nParameters\n----------\n"
        "a, b : the sizes.   c : whether\n    or not.\nd : float\n    A rate.\n\nReturns\n-------\nWhat is left.\n"
    )
    assert rewritten(text) == (
        "Sum.\n\n```text\n    W = A b\n```\n\n|  |  |\n| --- | --- |\n| a | one two |\n\nSee `x`.\n\n"
        "Parameters\n----------\na, b\n    the sizes.\nc\n    whether\n    or not.\nd : float\n    A rate.\n\n"
        "Returns\n-------\n:\n    What is left."
    )


def test_phrases_are_found_in_pages_and_messages_but_not_in_docstrings(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("It begins anew.\nArrays in\nplace of models.\n")
    (tmp_path / "fedapp").mkdir()
    (tmp_path / "fedapp" / "a.py").write_text('"""As ever."""\nTEXT = f"the key {1} is none"\n# whoever\n')
    assert phrases.found(tmp_path) == ["README.md: anew", "README.md: in\nplace of", "fedapp/a.py: is none"]


def test_the_picture_of_a_method_has_what_it_declares_to_send() -> None:
    every = {m.id: site_pages.flows(m) for m in registry.discover().values()}
    assert every["fedgh"] == {"down": "the head", "up": "class means", "once": ""}
    assert every["fedbabu"] == {"down": "the whole model", "up": "the body", "once": ""}
    assert every["pccvr"] == every["ccvr"] and every["ccvr"]["once"] == "count, mean and covariance of every class"
    assert not [m for m, found in every.items() if re.search(r"\b(down|ways|once)\b", " ".join(found.values()))]
    picture = site_pages.scheme(registry.get("fedgh"))
    assert "↓ the head" in picture and "↑ class means" in picture and "keep their body" in picture
    assert "secure sums: no" in picture and "secure sums: yes" in site_pages.scheme(registry.get("lgfedavg"))


def test_pages_of_methods_cite_all_authors_and_the_year() -> None:
    assert (
        "@misc{fedgh,\n  title = {FedGH: Heterogeneous Federated Learning with Generalized Global Header},\n"
        "  author = {Yi and Wang and Liu and Shi and Yu},\n  howpublished = {ACM MM},\n  year = {2023}\n}"
    ) in site_pages.in_code("fedgh")
    for m in registry.discover().values():
        ours = m.id in ("lda", "qda", "fedghg", "pccvr")
        assert ("note = {" if ours else "author = {") in site_pages.in_code(m.id) or m.id == "local", m.id


@pytest.mark.parametrize("method", [m for m in registry.ORDER if m != "local"])
def test_pages_of_methods_have_the_same_parts(method: str) -> None:
    """Standalone exchanges nothing; a method of no paper has none to differ from."""
    text = (DOCS / "methods" / f"{method}.md").read_text(encoding="utf-8")
    parts = ["**Use it when**", "**Not ", "## Formula", "$$", "## Payload"]
    if re.search(r": \*.+\*, ", text):
        parts.append("## Where we differ")
    assert [part for part in parts if part not in text] == []
    assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts)


def test_phrases_that_plain_english_avoids_do_not_come_back() -> None:
    places = phrases.found(ROOT)
    assert len(places) <= phrases.MOST, "\n".join(places)


def test_pages_have_one_word_for_a_body_and_for_the_weakest_clients() -> None:
    """Names in code keep their words."""
    other = re.compile(r"`[^`]*`|\b(extractors?|trunks?|worst (?:tenth|decile))\b", re.IGNORECASE)
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES if page.name != "CHANGELOG.md"}
    assert not {name: found for name, text in texts.items() if (found := [w for w in other.findall(text) if w])}


def test_long_commands_of_the_site_break_between_their_options() -> None:
    first = "fedapp compare digits --methods local,fd --seeds 5 --out runs/longer"
    long = f"{first} --set partition=dirichlet  # an answer"
    text = f"```console\ncd x  # short\n{long}\n```\n```text\n{long}\n```\n"
    command = f"# an answer\n{first} \\\n  --set partition=dirichlet"
    assert folded(text) == f"```sh\ncd x  # short\n{command}\n```\n```text\n{long}\n```\n"
    assert folded(folded(text)) == folded(text)
    for page in PAGES:
        before = re.sub(r"^```(console|bash)$", "```sh", page.read_text(encoding="utf-8"), flags=re.M)
        after = folded(before)
        assert sorted(before.replace("\\\n", " ").split()) == sorted(after.replace("\\\n", " ").split()), page
        assert not re.search(r" --?[\w-]+ \\\n +[^- ]", after), page


def test_lists_of_methods_on_pages_are_complete() -> None:
    methods = registry.discover().values()
    sums, robust, threat = (
        (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("secure-sums", "robustness", "threat-model")
    )
    which = sums[sums.index("## Which methods") : sums.index("## What the server still sees")]
    able, refused = which.split("Other methods are refused")
    for m in methods:
        title = "Training alone" if m.id == "local" else re.split(r",| \+", m.title)[0]
        assert title in named(able if listing.secure_sums(m) != "no" else refused), m.id
    capped = re.search(r"weighs by counts \((.*?): 2\)", robust)
    assert capped and set(re.split(", | and ", capped[1])) == {
        m.title for m in methods if m.usual_cap(m.hparams()) == 2.0
    }
    least = re.search(r"min_count=3\"` for (.*?)\.", threat)
    assert least and set(re.split(", | and ", least[1])) == {
        m.title for m in methods if m.class_threshold(m.hparams()) == "min_count"
    }


def named(text: str) -> set[str]:
    """The entries of the lists in a text."""
    return {entry.strip() for entry in re.split(r"[,;:.()]| and | with | is | sends ", text)}


def test_numbers_of_methods_are_those_of_the_registry() -> None:
    count = len(registry.ORDER)
    for file, number in (
        ("README.md", count),
        ("docs/index.md", count),
        ("pyproject.toml", count - 4),
        ("CITATION.cff", count - 4),
    ):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"\b{number} (more |further |federated-learning |)methods", text), file


def test_extras_and_digits_of_bodies_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    page = (DOCS / "installing.md").read_text(encoding="utf-8")
    rows = re.search(r"\| extra \| brings \|\n\|.*\n((?:\|.*\n)+)", page)
    assert rows and {e for line in rows[1].splitlines() for e in re.findall(r"`(\w+)`", line.split("|")[1])} == set(
        extras
    )
    frozen = (DOCS / "frozen.md").read_text(encoding="utf-8")
    wide = {"efficientnet-lite0": 1280, "minilm": 384}
    digests = [
        dataclasses.replace(b, pooling="mean", width=wide[b.name]).digest[:8] for b in known.KNOWN if not b.tokenizer
    ]
    assert digests and all(f"| {d} | " in frozen and d in frozen.split("`bodies=")[1] for d in digests)
