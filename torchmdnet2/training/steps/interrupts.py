"""Ctrl-C and SIGTERM (of a batch system) stop a training after the current step, with its state saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupted", "catch_signals"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal asked the training to stop.

    Args:
        number: of the signal.
        text: the message.
    """

    def __init__(self, number: int, text: str):
        super().__init__(text)
        self.exit_code = 128 + number


@contextmanager
def catch_signals() -> Iterator[Callable[[], int | None]]:
    """Within the block, the first SIGINT or SIGTERM is recorded; a second one raises KeyboardInterrupt at once.

    Yields:
        A function that gives the number of the signal, None before there was one. Outside the main thread, where
        Python has no signals, always None.
    """
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield lambda: caught[0] if caught else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
