"""Kinds of frames: the words that extended XYZ files have as config_type, kept as a number that stands for the word.

As a number it is a label like others, so that every format, cache and batch can hold it.
"""

from __future__ import annotations

import hashlib

__all__ = ["CONFIG_TYPE", "kind_code"]

CONFIG_TYPE = "scalar:config_type"
"""The label."""

_WHOLE = 2**31


def kind_code(word: object) -> float:
    """The number that stands for a word: a whole number for itself, else 48 bits of the word's SHA-256, from 2³¹ on."""
    text = str(word).strip()
    digits = text.removesuffix(".0")
    if digits.isascii() and digits.isdigit() and int(digits) < _WHOLE:
        return float(digits)
    return float(_WHOLE + int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))
