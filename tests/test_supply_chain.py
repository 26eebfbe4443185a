"""The supply chain (bar R31): few dependencies, all of them pinned where tests run, and a way to report faults."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

tomllib = pytest.importorskip("tomllib")  # Python 3.11
ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = {"torch", "numpy", "ase", "pydantic", "safetensors", "pyyaml", "rich"}
PINNED_BY_TORCH = ("nvidia-", "cuda-")  # exactly, in builds for CUDA
PART_OF_PYTHON = {"pip", "setuptools", "wheel"}  # which make the environment


def needed(extras: set[str]) -> dict[str, str]:
    """Package -> who asks for it, of all that pip installs with these extras into an environment as this one."""
    own = [*PROJECT["dependencies"], *(r for e in extras for r in PROJECT["optional-dependencies"][e])]
    found: dict[str, str] = {}
    left = [(Requirement(text), "torchmdnet2") for text in own]
    while left:
        requirement, parent = left.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name in found or name.startswith(PINNED_BY_TORCH) or name in PART_OF_PYTHON:
            continue
        found[name] = parent
        try:
            further = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:  # an extra that is not installed here
            continue
        for child in further:
            chosen = [{"extra": extra} for extra in requirement.extras] or [{"extra": ""}]
            if child.marker is None or any(child.marker.evaluate(e) for e in chosen):
                child.marker = None
                left.append((child, name))
    return found


def test_r31_core_dependencies_are_few():
    """A new one is a decision: extras are there for what only some users need."""
    assert {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]} == CORE


def test_r31_every_dependency_of_the_tests_is_pinned():
    """Of the commands in README.md and CONTRIBUTING.md, what others depend on included."""
    for page in ("README.md", "CONTRIBUTING.md"):
        assert "pip install -c constraints.txt -e '.[dev,openmm]'" in (ROOT / page).read_text(encoding="utf-8")
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    newer = r"( ; python_version >= \"3\.11\")?"  # without it pip finds no version for Python 3.10
    assert all(re.fullmatch(r"[\w.-]+==[\w.!+-]+" + newer, pin) for pin in pins)
    names = {canonicalize_name(pin.partition("==")[0]) for pin in pins}
    assert len(names) == len(pins)
    loose = {name: parent for name, parent in needed({"dev", "openmm", "docs"}).items() if name not in names}
    assert not loose, f"not in constraints.txt: package -> what needs it: {loose}"


def test_r31_faults_can_be_reported():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    section = text.partition("## Reporting")[2]
    assert "report privately" in section and "within a week" in section
