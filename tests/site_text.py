"""How text that was written for other places becomes text of the site: links of the repository, docstrings.

The pages in `docs/` are read on code hosts too, so their links are those of the repository. On the site a link to a
source file leads to its API page, or to the repository if FEDAPP_REPOSITORY names its address, or stays plain text.

In the source docstrings are plain text, with aligned symbols and equations. A page keeps the lines of such a paragraph.
The sections of numpydoc here say `name : what it means` in one line; its parser would take the meaning for a type.
"""

from __future__ import annotations

import os
import posixpath
import re

from tests import site_pages
from tests.readme import ROOT

WIDTH = 76
"""Characters of a command in one line: more would wrap on a screen of 1,280 pixels."""
OUTER = {name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")}
"""Pages at the top of the repository and their place on the site."""
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
SECTIONS = ("Parameters", "Attributes", "Returns", "Yields", "Raises", "Examples")
TYPE = re.compile(
    r"(?:(?:sequence|mapping|iterable|list|dict) of|ndarray|Tensor|array|float|int|bool|str|dict|list|tuple|None)\b"
)
ITEM = re.compile(r"(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)*) : (?P<text>.*)")


def _kept(block: str) -> bool:
    """Return whether the lines of a paragraph are aligned by hand: inner gaps, or lines that are set in."""
    lines = block.splitlines()
    if lines[0].lstrip().startswith(("|", ">>>", "```")):
        return False
    listed = bool(re.match(r"(\d+\.|-) ", lines[0]))
    set_in = any(re.match(r" {4,}" if listed else r" +", line) for line in lines)
    return set_in or any(re.search(r"\S {2,}\S", line) for line in lines)


def _roles(text: str) -> str:
    """Return the text with names that Sphinx would look up as code."""
    return re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", text)


def _table(block: str) -> str:
    """Return a table as Markdown knows it: with bars in place of reST's gaps, and no row that goes on below."""
    lines = block.splitlines()
    if lines[0].startswith("=="):
        starts = [m.start() for m in re.finditer("=+", lines[0])]
        ends = [*starts[1:], None]
        rows = [[line[a:b].strip() for a, b in zip(starts, ends)] for line in lines if not line.startswith("==")]
        rows = [[""] * len(starts), ["---"] * len(starts), *rows]
    else:
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    whole: list[list[str]] = []
    for row in rows:
        if row[0] or len(whole) < 2:
            whole.append(row)
        else:
            whole[-1] = [" ".join(filter(None, parts)) for parts in zip(whole[-1], row)]
    return "\n".join(f"| {' | '.join(row)} |" for row in whole)


def _block(text: str) -> str:
    if re.match(r"==+ +==", text) or (text.startswith("|") and "\n|-" in text and "`|" not in text):
        text = _table(text)
    elif _kept(text):
        return f"```text\n{text}\n```"
    return text.replace("][", "]\\[")


def _prose(text: str) -> str:
    """Return the part before the sections, with aligned paragraphs as blocks; `a["b"]["c"]` is no link."""
    return "\n\n".join(map(_block, re.split(r"\n{2,}", text)))


def _items(lines: list[str], named: bool) -> list[str]:
    """Return the lines of a section with what is meant below what it is about."""
    found: list[str] = []
    apart = [
        part for line in lines for part in (re.split(r" {3,}(?=\w+(?:, \w+)* : )", line) if line[:1] != " " else [line])
    ]
    for place, line in enumerate(apart):
        follows = place + 1 < len(apart) and apart[place + 1].startswith("    ")
        match = ITEM.fullmatch(line)
        if not line.strip() or line[0] == " ":
            found.append(line)
        elif match and not (follows and TYPE.match(match["text"])):
            found += [match["names"], f"    {match['text']}"]
        elif not match and not named and not (follows and TYPE.match(line)):
            # A sentence about what is returned: its type is that of the signature.
            if found and found[-1].strip() and found[0] == ":":
                found.append(f"    {line}")
            else:
                found += [":", f"    {line}"]
        else:
            found.append(line)
    return found


def rewritten(text: str) -> str:
    """Return a docstring in the form that numpydoc's sections and Markdown need."""
    heads = rf"(?:^|\n)({'|'.join(SECTIONS)})\n-{{3,}}\n"
    prose, *rest = re.split(heads, _roles(text))
    parts = [_prose(prose.strip("\n"))]
    for name, body in zip(rest[::2], rest[1::2]):
        lines = body.strip("\n").splitlines()
        if name != "Examples":
            lines = _items(lines, named=name in ("Parameters", "Attributes", "Raises"))
        parts.append("\n".join([name, "-" * len(name), *lines]))
    return "\n\n".join(parts)


def _pages() -> dict[str, str]:
    api = {name: name for names in site_pages.api().values() for name in names}
    methods = {f"{side}.{m}": m for side in ("strategies", "clients") for m in site_pages.registry.ORDER}
    return {f"{name.replace('.', '/')}.py": f"api/{page}.md" for name, page in {**api, **methods}.items()}


def _place(target: str) -> str | None:
    """Return the place on the site of a path of the repository, or None."""
    if target in OUTER:
        return OUTER[target]
    if target in ("README.md", "docs/methods"):
        return {"README.md": "index.md"}.get(target, "methods/index.md")
    if target.startswith("docs/") and (ROOT / target).is_file():
        return target.removeprefix("docs/")
    return _pages().get(target)


def relinked(text: str, folder: str, here: str) -> str:
    """Return Markdown with its links turned to the site.

    Parameters
    ----------
    folder : folder of the text in the repository, to which its links are relative.
    here : place of the page on the site.
    """
    address = os.environ.get("FEDAPP_REPOSITORY", "").rstrip("/")

    def put(match: re.Match[str]) -> str:
        label, target = match.groups()
        path, mark, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, path))
        place = _place(path)
        if place is not None:
            return f"[{label}]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{mark}{anchor})"
        return f"[{label}]({address}/blob/HEAD/{path})" if address else label

    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    return "".join(part if part.startswith("```") else LINK.sub(put, part) for part in parts)


def _lines(command: str) -> str:
    """Break a long command between its words, never between an option and its value; a comment goes above it."""
    if len(command) <= WIDTH or command.startswith("#"):
        return command
    text, _, comment = command.partition("  # ")
    words = re.findall(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""", text)
    parts = re.sub(r"\n(?!-)", " ", "\n".join(words)).split("\n")  # an option with all that follows it
    before = re.match(" *", text)[0]  # type: ignore[index]
    lines = [f"{before}# {comment.strip()}"] * bool(comment) + [before + parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) < WIDTH - 2:
            lines[-1] += f" {part}"
        else:
            lines[-1:] = [f"{lines[-1]} \\", f"{before}  {part}"]
    return "\n".join(lines)


def folded(page: str) -> str:
    """Return a page whose long commands have several lines: a browser would break them within an option.

    They become `sh`: in `console` a comment would have the colours of a command.
    """

    def fold(match: re.Match[str]) -> str:
        return "```sh\n" + "\n".join(map(_lines, re.sub(r" *\\\n *", " ", match[1]).split("\n")))

    return re.sub(r"^```(?:console|bash|sh)\n(.*?^```)", fold, page, flags=re.S | re.M)
