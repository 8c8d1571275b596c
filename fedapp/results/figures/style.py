"""How all figures look, and how they are written: the same bytes for the same data.

Colours are those of Okabe and Ito, darkened or lightened until they stand out from white and from near-black; nothing
is said by colour alone, so that every figure can be read on a grey printer: lines differ in dashes and markers, classes
and clients are drawn as their own numbers, heat maps run from light to dark.
"""

from __future__ import annotations

import functools
import html
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec
from weakref import WeakKeyDictionary

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

INK, MUTED, LINE = "#1b1d21", "#666b74", "#d4d7dd"
"""Text, secondary text and axes, grid lines. On the page these three follow the reader's light or dark scheme."""
COLOURS = (
    "#0072b2", "#d55e00", "#00916a", "#b5609a", "#b07d00", "#3a9bd0", "#7a7f87", "#8f5f3a", "#6a62c9", "#c63d5c",
)  # fmt: skip
DASHES: tuple[Any, ...] = (
    "-", (0, (5, 2)), (0, (1.2, 1.6)), (0, (6, 2, 1.2, 2)), (0, (3, 1.5)), (0, (8, 2, 1, 2, 1, 2)),
)  # fmt: skip
DOTTED = (0, (1, 2))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
HEAT = LinearSegmentedColormap.from_list("fedapp-heat", ["#f4f6f9", "#bcd3e6", "#6aa3cc", "#22699f", "#08294b"])
"""Light to dark in one hue: the order of lightness is the order of values."""
ON_DARK, ON_LIGHT = "#fffffe", "#000001"
"""Text on dark and on light cells of a heat map; a page in a dark scheme exchanges them, and turns the cells around."""
WIDTH = 7.8
"""Width of a full figure in inches."""
NARROW = 3.7
"""Width of all figures on a phone in inches: 355 CSS pixels, which a screen of 390 has besides its margins."""
SMALLEST = 7.6
"""Size of letters in points that is at least ten CSS pixels."""

SETTINGS: Any = dict(mpl.rcParamsDefault) | {
    "font.sans-serif": ["DejaVu Sans"], "font.size": 8.5, "text.color": INK,
    "axes.titlesize": 9, "axes.titlelocation": "left", "axes.titlecolor": INK,
    "axes.labelsize": 8.5, "axes.labelcolor": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": MUTED, "axes.linewidth": 0.7,
    "axes.facecolor": "none", "figure.facecolor": "none", "savefig.facecolor": "none",
    "axes.axisbelow": True, "grid.color": LINE, "grid.linewidth": 0.6,
    "xtick.color": MUTED, "xtick.labelsize": 8, "xtick.major.width": 0.7,
    "ytick.color": MUTED, "ytick.labelsize": 8, "ytick.major.width": 0.7,
    "legend.frameon": False, "legend.fontsize": 8,
    "lines.linewidth": 1.6, "lines.markersize": 4,
    "svg.hashsalt": "fedapp", "text.parse_math": False,  # a class may be called $5_$10
}  # fmt: skip
"""Everything that matplotlib reads while it draws and writes; what the process itself has set does not count."""
_P = ParamSpec("_P")
_NARROWLY: ContextVar[bool] = ContextVar("narrowly", default=False)
_AGAIN: WeakKeyDictionary[Figure, Callable[[], Figure]] = WeakKeyDictionary()
_HOVER: WeakKeyDictionary[Figure, list[Sequence[str]]] = WeakKeyDictionary()


def styled(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    """Draw under `SETTINGS`, which leaves those of the process untouched; what it drew can be drawn for a phone too."""

    @functools.wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        def again() -> Figure:
            _NARROWLY.set(True)
            with mpl.rc_context(SETTINGS):
                return draw(*args, **kwargs)

        with mpl.rc_context(SETTINGS):
            figure = draw(*args, **kwargs)
        context = copy_context()  # with the looks of the methods, which may be over when it is drawn again
        _AGAIN[figure] = lambda: context.copy().run(again)
        return figure

    return drawn


def is_narrow() -> bool:
    """Whether the figure is for a phone."""
    return _NARROWLY.get()


def letters(size: float) -> float:
    """Return a size of letters in points, on a phone at least `SMALLEST`."""
    return max(size, SMALLEST) if is_narrow() else size


def name_marks(artist: Artist, texts: Sequence[str]) -> None:
    """Give each mark of a line a text, which a page shows under the pointer."""
    if not texts:  # nothing is drawn
        return
    figure = artist.get_figure(root=True)
    assert figure is not None, "the artist is drawn"
    known = _HOVER.setdefault(figure, [])
    artist.set_gid(f"marks{len(known)}{artist.get_gid() or ''}")
    known.append(texts)


_PLACES: ContextVar[Mapping[str, int]] = ContextVar("places", default={})  # noqa: B039, it is never changed


@contextmanager
def one_look_each(labels: Sequence[str]) -> Iterator[None]:
    """Give each method one colour, dash and marker in all figures drawn inside, also where some do not show it."""
    token = _PLACES.set({label: i for i, label in enumerate(dict.fromkeys(labels))})
    try:
        yield
    finally:
        _PLACES.reset(token)


def place_of(label: str, shown: Sequence[str]) -> tuple[int, bool]:
    """Return which look a line has, and whether its page gives it one.

    It is the line's place on the page, or else among the lines that its figure shows. A line that stands for several
    variants of a method (`FedProx` for `FedProx (mu=1)`) looks like the first of them, and one in a certain setting
    (`FedAvg, alpha 1`) like the method, unless the figure shows it in several.
    """
    found = {other: _place(other) for other in dict.fromkeys((label, *shown))}
    if (place := found[label]) is None:
        return list(shown).index(label), not _PLACES.get()
    shared = label not in _PLACES.get() and list(found.values()).count(place) > 1
    return (list(shown).index(label) if shared else place), True


def mark_of(label: str) -> str | None:
    """Return the name of a method's lines and marks, by which a page highlights them; None for anything else."""
    return None if (place := _place(label)) is None else f"method{place}"


def _place(label: str) -> int | None:
    places = _PLACES.get()
    if label in places:
        return places[label]
    for known, i in places.items():
        if known.partition("(")[0].strip() == label or label.startswith(f"{known}, "):
            return i
    return None


def _with_titles(svg: str, group: str, texts: Sequence[str]) -> str:
    """Give the marks of a group of an SVG their titles, in the order in which they were drawn."""
    start = svg.index(group)
    following = re.compile("<g (id|data-method)=").search(svg, start + 1)
    end = following.start() if following else len(svg)
    head, *marks = re.split(r"(?=<use )", svg[start:end])
    named = (
        re.sub("/>", f"><title>{html.escape(t, quote=False)}</title></use>", m, count=1) for m, t in zip(marks, texts)
    )
    return svg[:start] + head + "".join(named) + svg[end:]


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure with what a page needs next to it.

    Attributes
    ----------
    id : file name and anchor.   title : a heading.   caption : the content and how to read it.
    alt : the content in words, for readers who do not see it.   source : the paper's figure, or an empty string.
    """

    id: str
    title: str
    caption: str
    alt: str
    figure: Figure
    source: str = ""

    def svg(self, text: bool = True) -> str:
        """Return the figure as SVG, the same bytes for the same data.

        Parameters
        ----------
        text : keep letters as text (for a page); False turns them into outlines (for a paper, whatever its fonts).
        """
        buffer, dpi = io.StringIO(), self.figure.dpi
        self.figure.set_facecolor("none" if text else "white")
        with mpl.rc_context({**SETTINGS, "svg.fonttype": "none" if text else "path"}):
            # `savefig` draws twice, the first time for the layout alone, which is part of each drawing.
            FigureCanvasSVG(self.figure).print_svg(  # type: ignore[no-untyped-call]
                buffer, metadata={"Date": None, "Creator": None}
            )
        self.figure.dpi = dpi
        # Names of methods are no ids: a method has several lines.
        svg = re.sub(r'(<[^>]* id="marks\d+)method', r'\1" id="method', buffer.getvalue())
        return re.sub(r'(<[^>]*) id="method(\d+)"', r'\1 data-method="\2"', svg)

    @functools.cached_property
    def inline(self) -> str:
        """The figure as SVG elements for a page, with ids of their own and without a reference to the web.

        One is as wide as a page, the other as a phone's, with letters of ten pixels; the page shows one of them. Text,
        axes and heat maps take the page's colours.
        """
        wide = self._element(self.svg(), self.id, "wide")
        if (again := _AGAIN.get(self.figure)) is None:
            return wide
        narrow = Drawing(self.id, self.title, self.caption, self.alt, again(), self.source)
        return wide + self._element(narrow.svg(), f"{self.id}-narrow", "narrow")

    def _element(self, svg: str, name: str, kind: str) -> str:
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        svg = re.sub(r"<[^>]*>", lambda tag: self._tag(tag[0], name), svg)  # texts stay as they are
        for number, texts in enumerate(_HOVER.get(self.figure, ())):
            svg = _with_titles(svg, f'<g id="{name}-marks{number}"', texts)
        head, rest = svg.split(">", 1)
        box = re.search(r'viewBox="([^"]+)"', head)
        assert box is not None, "matplotlib writes a viewBox"
        width = float(box[1].split()[2]) / 72
        return (
            f'<svg class="{kind}" viewBox="{box[1]}" style="max-width:{width:.2f}in" role="img" '
            f'aria-labelledby="{name}-alt" xmlns="http://www.w3.org/2000/svg" '
            f'xmlns:xlink="http://www.w3.org/1999/xlink">'
            f'<title id="{name}-alt">{html.escape(self.alt, quote=False)}</title>{rest.strip()}'
        )

    @staticmethod
    def _tag(svg: str, name: str) -> str:
        """Return a tag of an SVG with ids of a figure's own and the page's colours."""
        svg = re.sub(r"(\.\d\d)\d+", r"\1", svg)  # a hundredth of a point is not seen
        svg = re.sub(r' id="image[0-9a-f]+"', "", svg)  # of their content, which two scales may share
        svg = re.sub(r' id="([^"]+)"', rf' id="{name}-\1"', svg)
        svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
        svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
        svg = re.sub(r"'DejaVu Sans'(, *[^;\"]*)?", "var(--sans)", svg)
        # Pixels that are drawn as they are belong to heat maps and to their scales.
        svg = re.sub(r'style="image-rendering:[^"]*pixelated"', 'class="heat"', svg)
        for colour, variable in (
            (INK, "currentColor"), (MUTED, "var(--muted)"), (LINE, "var(--line)"),
            (ON_DARK, "var(--on-dark)"), (ON_LIGHT, "var(--on-light)"),
        ):  # fmt: skip
            svg = svg.replace(colour, variable)
        return svg

    def png(self, dpi: int = 200) -> bytes:
        """Return the figure as PNG on white."""
        buffer = io.BytesIO()
        with mpl.rc_context(SETTINGS):
            self.figure.savefig(buffer, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
        return buffer.getvalue()

    def save(self, folder: Path) -> None:
        """Write `ID.png` and `ID.svg` into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.id}.png").write_bytes(self.png())
        (folder / f"{self.id}.svg").write_text(self.svg(text=False), encoding="utf-8")
