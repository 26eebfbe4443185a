"""What all tests share."""

from __future__ import annotations

import os

import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from quick_interpreter import speed_up

    speed_up()

torch.set_num_threads(1)  # the structures of the tests are tiny: more threads only wait for each other
