"""The kernels that a training step takes on a GPU, from features to the gradients of the loss, in Triton's interpreter.

Run by test_packed_step.py in a process of its own, in which tensors claim to be on a GPU while a step is computed.
"""

from __future__ import annotations

import pytest
import torch

from training import packed_step_cases as cases


@pytest.mark.parametrize("name", cases.CASES)
def test_kernels_equal_plain_pytorch(name, monkeypatch):
    expected = cases.outcome(cases.CASES[name], "cpu", False)
    computed = cases.gradients

    def on_gpu(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
            return computed(*arguments)

    monkeypatch.setattr(cases, "gradients", on_gpu)
    cases.check_same(cases.outcome(cases.CASES[name], "cpu", True), expected)
