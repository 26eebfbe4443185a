"""Fixtures of the tests of streams."""

from __future__ import annotations

import pytest

import torchmdnet2


@pytest.fixture(scope="module")
def small():
    return torchmdnet2.load("organic-small")
