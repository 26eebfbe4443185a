"""HTML pages of reports: one file with its style and pictures in it, no scripts; the pictures as PNG."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

__all__ = ["breakable", "document", "figure_png", "image", "missing_plots", "table"]


if TYPE_CHECKING:
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


def document(title: str, body: Sequence[str]) -> str:
    """Return a page from its title, in plain text, and the parts of its body, in HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def missing_plots() -> str:
    """Return why no plots can be drawn, in words; "" if they can."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        return f"no plots: {error.name} is not installed (pip install 'torchmdnet2[plot]')"
    return ""


def figure_png(draw: Callable[[Figure], None], size: tuple[float, float]) -> bytes:
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


def image(content: bytes, text: str, kind: str = "plot") -> str:
    """Return a PNG as HTML, with a text for those who cannot see it and its class in the style."""
    data = base64.b64encode(content).decode()
    return f'<img class="{kind}" alt="{html.escape(text)}" src="data:image/png;base64,{data}">'


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    code: bool = False,
    escaped: bool = False,
    left: Sequence[int] = (0,),
) -> str:
    """Return a table of numbers; columns in `left` are text."""
    kind = [" class=text" if k in left else "" for k in range(len(heads))]
    show = (lambda text: text) if escaped else breakable
    opening, closing = ("<code>", "</code>") if code else ("", "")
    top = "".join(f"<th{k}>{html.escape(head)}</th>" for k, head in zip(kind, heads, strict=True))
    lines = "".join(
        "<tr>"
        + "".join(f"<td{k}>{opening}{show(str(cell))}{closing}</td>" for k, cell in zip(kind, row, strict=True))
        + "</tr>\n"
        for row in rows
    )
    return f'<div class="table"><table><tr>{top}</tr>\n{lines}</table></div>'


def breakable(text: str) -> str:
    """Return the text as HTML in which a long path may be broken."""
    return re.sub(r"\S{25,}", lambda word: re.sub("([/_])", r"\1<wbr>", word[0]), html.escape(text))
