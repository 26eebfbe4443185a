"""What everything uses. Here: the messages that kernels are compiled.

They are warnings of Python's logger "torchmdnet2.kernels", which goes to stderr where a program has set up no
logging. `logging.getLogger("torchmdnet2").setLevel("ERROR")` switches them off.
"""

from __future__ import annotations

import logging

__all__ = ["announce", "announce_wait"]


_LOGGER = logging.getLogger("torchmdnet2.kernels")


def announce(number: int, device: str, seconds: float, folder: str) -> None:
    """Log that kernels are compiled now.

    Args:
        number: of kernels.
        device: "CPU" or "GPU".
        seconds: the expected duration.
        folder: where they are kept; "" where they are not.
    """
    kernels = "1 kernel" if number == 1 else f"{number} kernels"
    kept = f"once: kept in {folder}" if folder else "in every process: there is no folder where they can be kept"
    _LOGGER.warning(
        "compiling %s for the %s, about %d s on an idle machine, %s", kernels, device, max(1, round(seconds)), kept
    )


def announce_wait(device: str, folder: str) -> None:
    """Log that this process waits for another one, which compiles kernels for a device and keeps them in a folder."""
    _LOGGER.warning("waiting for another process, which compiles kernels for the %s: kept in %s", device, folder)
