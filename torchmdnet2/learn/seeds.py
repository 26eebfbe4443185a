"""Seeds of a round, derived from that of the run."""

from __future__ import annotations

import hashlib

__all__ = ["seed_of"]


def seed_of(seed: int, what: str, *numbers: int) -> int:
    """A seed below 2⁵⁶ for one purpose, as seed_of(0, "training", round, member)."""
    words = " ".join(map(str, (seed, what, *numbers)))
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:7], "little")
