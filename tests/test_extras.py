"""A package that is not installed is named, with the extra that installs it, before any work is done."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
D3 = "[{name: d3, elements: [1, 29], s8: 1.2, a1: 0.4, a2: 4.8}]"
CASES = {  # package -> its extra, and what needs it; the files named none.* are not there: work would end otherwise
    "openmm": ("openmm", "import torchmdnet2.adapters.openmm"),
    "openmmml": ("openmm", "import torchmdnet2.adapters.openmmml"),
    "torch_sim": ("torch-sim", "import torchmdnet2.adapters.torch_sim"),
    "mpi4py": ("lammps", "Path('in.lmp').touch(); main(['lammps', 'organic', 'in.lmp', '--elements', 'H'])"),
    "chemfiles": ("xtc", "from torchmdnet2.md.trajectory import XTC; XTC.check(Path('none.xtc'), None)"),
    "rdkit": ("smiles", "main(['md', 'organic', '--smiles', 'CCO'])"),
    "huggingface_hub": ("hub", "main(['fetch', 'some/model'])"),
    "distributed": ("dask", "relax('--dask', 'tcp://none:1')"),
    "matplotlib": ("plot", "relax('--report')"),
    "torch_cluster": ("cluster", "neighbors('torch_cluster')"),
    "h5py": ("hdf5", "from torchmdnet2.core.files import opened_hdf5; opened_hdf5('none.h5')"),
    "tad_dftd3": ("d3", f"train({D3!r})"),
    "tensorboard": ("tensorboard", "train('[]', 'tensorboard: true')"),
    "wandb": ("wandb", "train('[]', 'wandb: {}')"),
}
SCRIPT = """
import io, json, sys
from contextlib import redirect_stderr
from pathlib import Path

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in cases:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

cases, told = json.load(sys.stdin), {}
sys.meta_path.insert(0, Blocked())
from torchmdnet2.cli import main

def relax(*options):
    Path("in.xyz").touch()
    main(["relax", "organic-small", "in.xyz", "out.xyz", *options])

def neighbors(backend):
    from ase.build import molecule
    from torchmdnet2 import System
    from torchmdnet2.neighbors import neighbor_list
    neighbor_list(System.from_ase(molecule("H2O")), 5.0, backend=backend)

def train(priors, output=""):
    Path("config.yaml").write_text(f"data: {{train: none.xyz}}\\npriors: {priors}\\noutput: {{folder: run, {output}}}")
    main(["train", "config.yaml"])

for package, (_, code) in cases.items():
    with redirect_stderr(io.StringIO()) as words:
        try:
            exec(code)
        except (Exception, SystemExit) as error:
            print(error, file=sys.stderr)
    told[package] = words.getvalue()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Package -> what is said when it is missing."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=json.dumps(CASES), capture_output=True, text=True,
        cwd=tmp_path_factory.mktemp("extras"), check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("package", CASES)
def test_missing_packages_are_named_first(package, told):
    extra = CASES[package][0]
    assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.M)
    assert f"pip install 'torchmdnet2[{extra}]'" in told[package]
    assert "none" not in told[package]
