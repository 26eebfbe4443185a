"""Rows of frames in flat tables on the device, and where a batch finds them.

Shapes: B frames in a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Gathered", "Rows"]


class Rows:
    """Where the rows of each frame are in a flat table; the frame after the last has none."""

    def __init__(self, sizes: np.ndarray, device: torch.device):
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        self.sizes = torch.from_numpy(np.append(sizes, 0)).to(device)
        self.offsets = torch.from_numpy(offsets).to(device)
        self.total = int(offsets[-1])

    def gather(self, frame: Tensor, room: int) -> Gathered:
        """Rows of B frames, one after the other, in a room of fixed size.

        Args:
            frame: [B + 1], the last of them being the frame after the last, which gets the room that is not needed.
            room: at least what the frames need.
        """
        after = self.sizes[frame].cumsum(0)
        ptr = torch.cat([after.new_zeros(1), after[:-1], after.new_full((1,), room)])
        row = torch.arange(room, device=frame.device)
        owner = torch.searchsorted(after[:-1], row, right=True)
        source = (row + (self.offsets[frame] - ptr[:-1])[owner]).clamp(max=self.total)
        return Gathered(ptr, owner, owner < frame.shape[0] - 1, source)


@dataclass(eq=False)
class Gathered:
    """Rows in a room.

    Attributes:
        ptr: [B + 2] first row of each frame, of the room that is not needed, and the end.
        owner: [room] number of the frame that each row belongs to, B for rows without a use.
        used: [room] whether a row belongs to a frame.
        source: [room] its place in the table; the last one for rows without a use.
    """

    ptr: Tensor
    owner: Tensor
    used: Tensor
    source: Tensor
