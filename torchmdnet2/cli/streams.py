"""Standard output and error that take whatever a command prints."""

from __future__ import annotations

import codecs
import os
import sys
import unicodedata

__all__ = ["steady_streams"]

_PLAIN = {"−": "-", "–": "-", "→": "->", "≤": "<=", "≥": ">=", "·": "*", "×": "x", "μ": "u", "σ": "sigma", "Δ": "D"}


def steady_streams() -> None:
    """No character ends a command, in an ASCII terminal either, nor does a stream that the shell has closed (>&-)."""
    codecs.register_error("torchmdnet2.nearest", _nearest)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif hasattr(stream, "reconfigure"):  # not within notebooks
            stream.reconfigure(errors="torchmdnet2.nearest")


def _nearest(error: UnicodeError) -> tuple[str | bytes, int]:
    """What is printed for characters that the stream's encoding lacks: A for Å, 3 for ³, else ?."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if "\udc80" <= character <= "\udcff":  # a byte of a file name that is not text
        return bytes([ord(character) - 0xDC00]), error.start + 1
    plain = unicodedata.normalize("NFKD", character)
    return "".join(_PLAIN.get(c, c) for c in plain if _PLAIN.get(c, c).isascii()) or "?", error.start + 1
