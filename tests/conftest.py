"""What all tests share."""

from __future__ import annotations

import torch

torch.set_num_threads(1)  # the structures of the tests are tiny: more threads only wait for each other
