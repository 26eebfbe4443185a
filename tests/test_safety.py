"""Nothing executes, nothing global changes (R22 and R28), nothing imports upward."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from import_graph import circles, import_graph, upward_imports

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "torchmdnet2").rglob("*.py"))
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__"}
YAML = {"load", "load_all", "full_load", "unsafe_load", "Loader", "FullLoader", "UnsafeLoader"}


def faults(source: str) -> list[str]:
    """Every way to execute data that the source uses, as 'line: what'."""
    found = []

    def note(node: ast.AST, what: str) -> None:
        found.append(f"{node.lineno}: {what}")

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                if name.split(".")[0] in MODULES:
                    note(node, f"import {name}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            note(node, f"{node.func.id}()")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "yaml" and node.attr in YAML:
                note(node, f"yaml.{node.attr}")
            elif node.value.id in MODULES or (node.value.id == "builtins" and node.attr in CALLS):
                note(node, f"{node.value.id}.{node.attr}")
        if isinstance(node, ast.Call):
            words = {k.arg: k.value for k in node.keywords if k.arg}
            for word, good in (("weights_only", True), ("allow_pickle", False), ("trust_remote_code", False)):
                if word in words and not (isinstance(words[word], ast.Constant) and words[word].value is good):
                    note(node, f"{word} is not {good}")
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                if (node.func.value.id, node.func.attr) == ("torch", "load") and "weights_only" not in words:
                    note(node, "torch.load without weights_only=True")
            if "shell" in words and not (isinstance(words["shell"], ast.Constant) and words["shell"].value is False):
                note(node, "shell=True")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import load",
        "import dill as d",
        "eval(x)",
        "exec(x)",
        "yaml.load(f)",
        "yaml.load(f, Loader=yaml.FullLoader)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "torch.load(f, weights_only=flag)",
        "np.load(f, allow_pickle=True)",
        "import shelve",
        "builtins.eval(x)",
        "import marshal",
        "run(x, shell=True)",
    ],
)
def test_the_test_finds_them(source):
    assert faults(source)


def test_r22_no_source_executes_data():
    assert len(SOURCES) > 20
    allowed = [
        "yaml.safe_load(f)",
        "torch.load(f, weights_only=True)",
        "re.compile(x)",
        "model.eval()",
        "torch.compile(f)",
    ]
    assert not faults("\n".join(allowed))
    found = {str(p.relative_to(ROOT)): faults(p.read_text()) for p in SOURCES}
    assert not {path: what for path, what in found.items() if what}


def run(code: str) -> dict:
    """Run code in a fresh Python; it prints one line of JSON."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


STATE = """
    import json, os, random, sys, threading, warnings
    import numpy as np
    import torch

    def state():
        return {
            "dtype": str(torch.get_default_dtype()),
            "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
            "matmul": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "cudnn": [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic],
            "grad": torch.is_grad_enabled(),
            "anomaly": torch.is_anomaly_enabled(),
            "threads": torch.get_num_threads(),
            "rng": [torch.get_rng_state().sum().item(), str(np.random.get_state()[1][:9]), hash(random.getstate())],
            "env": dict(os.environ),
            "printing": repr(np.get_printoptions()),
            "python threads": threading.active_count(),
            "recursion": sys.getrecursionlimit(),
            "default device": str(torch.get_default_device()),
        }
"""


def test_r28_no_global_effects_of_import_and_use(tmp_path):
    """Random weights are drawn where a model is made; loading and using one draws none."""
    code = (
        STATE
        + f"""
    filters = list(warnings.filters)
    states = [state()]
    import torchmdnet2
    from torchmdnet2 import Evaluator, Potential, System, load, checkpoint, testing
    states.append(state())
    shown = [f for f in warnings.filters if f not in filters]
    with torch.random.fork_rng():
        p = Potential.from_config({{"model": {{"name": "tensornet", "hidden_channels": 4, "num_rbf": 4}}}})
    checkpoint.save(p, {str(tmp_path / "a.tmn")!r})
    p = load({str(tmp_path / "a.tmn")!r})
    system = System(z=torch.tensor([8, 1]), pos=torch.eye(3)[:2], cell=3 * torch.eye(3))
    p(system, stress=True), Evaluator(p)(system)
    p.double()(system.to(dtype=torch.float64))
    try:
        p(system.replace(z=torch.tensor([0, 1])))
    except ValueError:
        pass
    states.append(state())
    print(json.dumps({{"states": states, "warnings": len(shown)}}))
    """
    )
    seen = run(code)
    before, imported, used = seen["states"]
    assert imported == before
    assert used == before
    assert seen["warnings"] == 0, "importing adds warning filters"


def test_r28_import_is_quick_and_lean():
    """At most 0.5 s beyond torch, all public names included (best of three); nothing optional is imported."""
    code = """
    import json, sys, time
    import torch, numpy
    start = time.process_time()  # of this process alone, however busy the machine is
    import torchmdnet2
    first = time.process_time() - start
    from torchmdnet2 import Evaluator, Potential, System, load
    print(json.dumps({"first": first, "all": time.process_time() - start, "modules": sorted(sys.modules)}))
    """
    runs = [run(code) for _ in range(3)]
    assert min(r["first"] for r in runs) < 0.1
    assert min(r["all"] for r in runs) <= 0.5
    heavy = {"ase", "openmm", "openmmml", "h5py", "matplotlib", "pydantic", "rich", "scipy", "pickle5", "tblite"}
    assert not heavy & {name.split(".")[0] for name in runs[0]["modules"]}


def test_public_names():
    import torchmdnet2

    assert set(dir(torchmdnet2)) == set(torchmdnet2.__all__)
    for name in torchmdnet2.__all__:
        assert getattr(torchmdnet2, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        torchmdnet2.lode


LAYERS = """
    version errors units registry
    core
    system
    potentials neighbors
    potential
    kernels
    priors models
    checkpoint data importers
    engine
    evaluator
    ensemble
    adapters
    md training
    scan learn streams
    testing diagnostics benchmark
    cli
    __init__ __main__
""".split()
"""The package from the bottom to the top: a module imports only what stands before it."""


@pytest.fixture(scope="module")
def graph():
    return import_graph(ROOT / "torchmdnet2")


def test_layers_do_not_import_upward(graph):
    assert len(graph) > 200 and sum(map(len, graph.values())) > 500
    assert not upward_imports(graph, LAYERS)
    assert set(LAYERS) == {(*module.split("."), "__init__")[1] for module in graph}


def test_no_files_import_each_other(graph):
    assert not circles(graph)


UPWARD = {
    "relative": "from ..top import thing",
    "relative, of a package": "from .. import top",
    "relative, in the package above": "from ...package.top import thing",
    "absolute": "import package.top",
    "absolute, renamed": "import package.top as t",
    "absolute, from": "from package.top import thing",
    "absolute, from the package": "from package import top",
    "everything": "from ..top import *",
    "in a function": "def f():\n    from ..top import thing",
    "in a method": "class A:\n    def f(self):\n        import package.top",
    "for types only": "if TYPE_CHECKING:\n    from ..top import thing",
    "string": 'import_module("package.top")',
    "relative string": 'importlib.import_module("..top", __package__)',
    "keyword": 'importlib.import_module(name="package.top")',
    "string, renamed": 'from importlib import import_module as load\nload("package.top")',
    "put together": 'import_module(f"package.top.{name}")',
    "added up": 'import_module("package.top." + name)',
    "variable": "import_module(name)",
    "__import__": '__import__("package.top")',
    "the package itself": "from package import Potential",
}


@pytest.mark.parametrize("form", UPWARD)
def test_upward_imports_are_found_in_every_form(tmp_path, form):
    package = tmp_path / "package"
    (package / "low").mkdir(parents=True)
    (package / "__init__.py").write_text("from .top import Potential\n")
    (package / "low" / "__init__.py").write_text("")
    (package / "top.py").write_text("from .low.module import x\nimport package.low\nfrom . import low\n")
    layers = ["low", "top", "__init__"]
    module = package / "low" / "module.py"
    module.write_text("import math\nfrom . import __doc__\nfrom .module import x\nimport_module('torch')\n")
    assert not upward_imports(import_graph(package), layers)

    module.write_text(f"import math\n{UPWARD[form]}\n")
    (found,) = upward_imports(import_graph(package), layers)
    assert found.startswith("package.low.module:")
    assert "top is in no layer" in upward_imports(import_graph(package), ["low", "__init__"])
    assert circles(import_graph(package)), "what is imported downward and upward is a circle"


def test_circles_are_found(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    for name, source in {"__init__": "", "a": "from . import b", "b": "from .c import x", "c": "import os"}.items():
        (package / f"{name}.py").write_text(source)
    assert not circles(import_graph(package))
    (package / "c.py").write_text("def f():\n    from .a import x\n")
    assert circles(import_graph(package)) == [["package.a", "package.b", "package.c"]]


def test_no_constant_of_a_module_is_overwritten():
    """Functions above would read the value of the constant below. ruff finds functions and classes alone."""
    twice = []
    for path in sorted((ROOT / "torchmdnet2").rglob("*.py")):
        seen = set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            for name in (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)):
                if name in seen:
                    twice.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
                seen.add(name)
    assert not twice
