"""Every option of a command and every argument of an adapter is read by the code that takes it.

Whether it then acts is tested with the command or adapter. These walks find those that nobody reads: a new option or
argument that is only declared fails here.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from torchmdnet2 import cli
from torchmdnet2.cli import _parser
from torchmdnet2.learn import config as learn_config
from torchmdnet2.md import MDOptions
from torchmdnet2.md.options import FRICTION

SOURCES = sorted(Path(cli.__file__).parent.glob("*.py"))
BY_ARGPARSE = {"help", "version"}
BY_A_MADE_NAME = {"evaluate": ("_key", "_unit")}  # f"{name}_{kind}"; test_evaluate_units_keys_and_split uses them


def reads(tree: ast.AST) -> set[str]:
    """Names of attributes that are read, as of `options.steps`, and texts that getattr may take."""
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    return found | {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is str}


def declared(tree: ast.AST) -> ast.AST:
    """The same without calls of add_argument, whose texts are no reading."""

    class Without(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            is_declaration = isinstance(node.func, ast.Attribute) and node.func.attr in ("add_argument", "add_parser")
            return ast.Constant(None) if is_declaration else node

    return Without().visit(tree)


def commands() -> dict[str, argparse.ArgumentParser]:
    (verbs,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(verbs.choices)


@pytest.mark.parametrize("verb", commands())
def test_every_option_of_a_command_is_read(verb):
    parser = commands()[verb]
    module = inspect.getmodule(parser.get_default("run"))
    shared = [Path(cli.__file__), Path(cli.__file__).with_name("common.py")]
    read = set()
    for path in {Path(module.__file__), *shared}:
        read |= reads(declared(ast.parse(path.read_text(encoding="utf-8"))))
    options = {action.dest for action in parser._actions} - BY_ARGPARSE
    options = {name for name in options if not name.endswith(BY_A_MADE_NAME.get(verb, "-"))}
    assert options and options <= read, f"torchmdnet2 {verb} does not read {sorted(options - read)}"


NOT_READ = {  # what the interfaces of other packages hand over and say is not needed -> why
    "ase.TorchMDNet2Calculator.check_state.tol": "any change counts",
    "ase.TorchMDNet2Calculator.calculate.system_changes": "everything is computed anew",
    "ase.TorchMDNet2Calculator.todict.skip_default": "a calculator always says which model it is",
    "torch_sim.TorchMDNet2Model.forward.kwargs": "of torch-sim's integrators, for other models",
    "openmmml.TorchMDNet2Factory.createImpl.name": "openmm-ml has chosen the factory by it",
    "openmmml.TorchMDNet2Impl.createMixedSystem.embedding": "the only one that getSupportedEmbeddings names",
}


def adapters():
    """Name -> function, of all public functions and methods of the adapters."""
    with suppress(ImportError):
        import_module("openmmml")  # it imports our plug-in
    for name in ("ase", "openmm", "openmmml", "torch_sim", "lammps"):
        try:
            module = import_module(f"torchmdnet2.adapters.{name}")
        except ImportError:
            continue  # an extra that is not installed
        for public in getattr(module, "__all__", ()):
            one = getattr(module, public)
            if inspect.isfunction(one):
                yield f"{name}.{public}", one
            elif inspect.isclass(one):
                for key, method in vars(one).items():
                    if inspect.isfunction(method) and (key == "__init__" or not key.startswith("_")):
                        yield f"{name}.{public}.{key}", method


def test_every_argument_of_an_adapter_is_read():
    seen, idle = 0, set()
    for name, function in adapters():
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        used = {n.id for statement in tree.body for n in ast.walk(statement) if isinstance(n, ast.Name)}
        arguments = set(inspect.signature(function).parameters) - {"self", "cls"}
        seen += len(arguments)
        idle |= {f"{name}.{argument}" for argument in arguments - used}
    assert seen > 40
    assert idle <= NOT_READ.keys(), sorted(idle - NOT_READ.keys())


def test_the_walks_find_what_is_not_read():
    tree = ast.parse("def add(p):\n    p.add_argument('--idle')\ndef run(options):\n    return options.used")
    assert "used" in reads(declared(tree)) and "idle" not in reads(declared(tree))


def test_the_default_of_the_friction_has_one_source():
    """And a friction that somebody gives is never taken for the default, at constant energy."""
    assert MDOptions(1, ensemble="nvt").bath_friction == FRICTION
    assert [commands()[verb].get_default("friction") for verb in ("md", "stability")] == [None, None]
    fields = [one.model_fields for one in vars(learn_config).values() if hasattr(one, "model_fields")]
    assert {each["friction"].default for each in fields if "friction" in each} == {FRICTION}
