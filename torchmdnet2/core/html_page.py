"""HTML pages of reports: one file with its style and pictures in it, no scripts; the pictures as PNG.

A page is a title and a list of parts: notes, tables, figures, and sections of them. Text is escaped here, once. A part
without content is "", and is left out; so is a section without one.
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import yaml

__all__ = [
    "Markup", "breakable", "configuration", "document", "facts", "figure_png", "figures", "image", "missing_plots",
    "note", "paragraph", "plot_png", "section", "table",
]  # fmt: skip


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_STYLE = """
:root { color-scheme: light }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24;
  background: #fff }
h1 { font-size: 1.6rem; margin-bottom: .2rem; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin-top: 2rem; border-bottom: 1px solid #ccd }
.table { overflow-x: auto; margin: .6rem 0 } table { border-collapse: collapse }
th, td { padding: .18rem .7rem; text-align: right } .text { text-align: left }
th { border-bottom: 1px solid #99a; font-weight: 600; vertical-align: bottom; white-space: pre }
td:first-child, th:first-child { padding-left: 0 }
tr:nth-child(even) td { background: #f6f7f9 }
.pictures { display: flex; flex-wrap: wrap; align-items: flex-start; gap: .6rem }
.pictures img { width: 30rem; max-width: 100% }
.wide { width: 100% }
.structure { width: 8rem; display: block; mix-blend-mode: multiply }
pre { background: #f6f7f9; padding: .8rem; overflow-x: auto; font-size: .82rem }
code { font-size: .85em; overflow-wrap: anywhere } .note { color: #57606a }
@media (max-width: 40rem) { body { margin: 1rem auto } th, td { padding: .18rem .4rem } .structure { width: 6rem } }
@media print {
  body { max-width: none; margin: 0; font-size: 10pt } h2 { break-after: avoid } tr, img { break-inside: avoid }
  .pictures img { width: 48% } .structure { width: 5rem }
  .table, pre { overflow: visible } pre { white-space: pre-wrap }
}
"""


class Markup(str):
    """HTML in a cell of a table, which escapes other text."""


def document(title: str, *parts: str) -> str:
    """Return a page from its title, in plain text, and its parts, in HTML."""
    body = "\n".join(filter(None, [f"<h1>{html.escape(title)}</h1>", *parts]))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def section(heading: str, *parts: str) -> str:
    """Return a heading, in plain text, and its parts, in HTML; nothing if all of them are empty."""
    content = "\n".join(filter(None, parts))
    return content and f"<h2>{html.escape(heading)}</h2>\n{content}"


def paragraph(text: str) -> str:
    """Return a paragraph of plain text."""
    return text and f"<p>{html.escape(text)}</p>"


def note(text: str) -> str:
    """Return a paragraph of plain text that explains or qualifies another part."""
    return text and f"<p class=note>{html.escape(text)}</p>"


def configuration(values: Mapping[str, object]) -> str:
    """Return plain data as YAML."""
    text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
    return f"<pre>{html.escape(text)}</pre>"


def missing_plots() -> str:
    """Return why no plots can be drawn, in words; "" if they can."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        return f"no plots: {error.name} is not installed (pip install 'torchmdnet2[plot]')"
    return ""


def figure_png(draw: Callable[[Figure], object], size: tuple[float, float]) -> bytes:
    """Return a figure of this size (inches) as PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=150, layout="constrained")  # pyplot would change the backend of the user
    FigureCanvasAgg(figure)
    draw(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})  # equal plots, equal bytes
    return buffer.getvalue()


def plot_png(draw: Callable[[Axes], object], size: tuple[float, float] = (5.2, 4.2)) -> bytes:
    """Return a figure with a single plot as PNG, as `figure_png` does."""
    return figure_png(lambda figure: draw(figure.subplots()), size)


def image(content: bytes, text: str, kind: str = "plot") -> Markup:
    """Return a PNG as HTML, with a text for those who cannot see it and its class in the style."""
    data = base64.b64encode(content).decode()
    return Markup(f'<img class="{kind}" alt="{html.escape(text)}" src="data:image/png;base64,{data}">')


def figures(drawn: Iterable[tuple[str, bytes]]) -> str:
    """Return plots beside each other, from the text of each, see `image`, and its PNG."""
    content = "\n".join(image(png, text) for text, png in drawn)
    return content and f"<div class=pictures>\n{content}\n</div>"


def facts(values: Mapping[str, object]) -> str:
    """Return a table of names and values."""
    return table(["", ""], values.items(), left=(0, 1))


def table(
    heads: Sequence[str], rows: Iterable[Sequence[object]], code: bool = False, left: Sequence[int] = (0,)
) -> str:
    """Return a table of numbers; columns in `left` are text. Without rows there is none."""
    kind = [" class=text" if k in left else "" for k in range(len(heads))]
    opening, closing = ("<code>", "</code>") if code else ("", "")
    top = "".join(f"<th{k}>{html.escape(head)}</th>" for k, head in zip(kind, heads, strict=True))
    lines = ""
    for row in rows:
        cells = (cell if isinstance(cell, Markup) else breakable(str(cell)) for cell in row)
        shown = "".join(f"<td{k}>{opening}{cell}{closing}</td>" for k, cell in zip(kind, cells, strict=True))
        lines += f"<tr>{shown}</tr>\n"
    return lines and f'<div class="table"><table><tr>{top}</tr>\n{lines}</table></div>'


def breakable(text: str) -> str:
    """Return the text as HTML in which a long path may be broken."""
    return re.sub(r"\S{25,}", lambda word: re.sub("([/_])", r"\1<wbr>", word[0]), html.escape(text))
