"""The wheel and the source archive: complete, and usable without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from torchmdnet2.version import __version__

ROOT = Path(__file__).parents[1]
SKIPPED = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "runs", "venv", "site")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, source archive), made from a copy of the tree."""
    pytest.importorskip("setuptools", minversion="77.0.3")
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "tree", ignore=SKIPPED)
    code = "from setuptools import build_meta as b; print(b.build_wheel('..')); print(b.build_sdist('..'))"
    command = [sys.executable, "-c", code]
    made = subprocess.run(command, cwd=folder / "tree", capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    (wheel,), (archive,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, archive


def test_the_wheel_holds_the_package(built, tmp_path):
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        wheel.extractall(tmp_path)
    package = ROOT / "torchmdnet2"
    files = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert names == {path.relative_to(ROOT).as_posix() for path in files}
    code = "import torchmdnet2, torchmdnet2.cli as c; print(torchmdnet2.__file__); c.main(['info'])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(str(tmp_path))


def test_the_source_archive_holds_what_the_readme_uses(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [
        "README.md",
        "constraints.txt",
        "configs/quickstart.yaml",
        "examples/data/ethanol_gfn2.xyz",
        "tests/conftest.py",
    ]
    assert not [name for name in wanted if name not in names]


def test_the_conda_recipe_agrees():
    """Version and dependencies are those of pyproject.toml, by conda-forge's names, with the most useful extras."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    recipe = yaml.safe_load((ROOT / "scripts" / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    names = {"torch": "pytorch", "vesin": "python-vesin"}
    lines = [line.partition(">=") for line in project["dependencies"] + extras["cpu"] + extras["hdf5"]]
    wanted = {f"{names.get(name, name)} >={version}" for name, _, version in lines}
    needs = recipe["requirements"]
    assert {*needs["run"], *needs["run_constraints"]} == wanted | {"python >=3.10"}
    assert recipe["context"]["version"] == __version__
