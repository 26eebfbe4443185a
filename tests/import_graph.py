"""Which module of a package imports which other one, read from its source, and what must not be among these imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

Graph = Mapping[str, Sequence[tuple[str, int]]]


def import_graph(root: Path) -> dict[str, list[tuple[str, int]]]:
    """module -> the modules of the same package that it imports, with the line; of all forms and at any depth.

    Imports under TYPE_CHECKING and in functions count like others: who reads the code has to know those modules too.
    An import of the form `from package import name` is one of package.name where this is a module. That Python runs
    the `__init__` of a package before its modules is not counted: every package would be in a circle.

    Args:
        root: folder of the package.
    """
    paths = {}
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, list[tuple[str, int]]] = {}
    for module, path in paths.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        found = _imports(ast.parse(path.read_text(encoding="utf-8")), package)
        ours = [(_longest(name, paths), line) for name, line in found if name.split(".")[0] == root.name]
        graph[module] = [(target, line) for target, line in ours if target != module]
    return graph


def _longest(name: str, modules: Mapping[str, Path]) -> str:
    """The module that a dotted name names, or the one in which it is defined."""
    while name not in modules:
        name = name.rpartition(".")[0]
    return name


def _imports(tree: ast.Module, package: str) -> Iterator[tuple[str, int]]:
    importers = {"import_module", "__import__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("importlib", "builtins"):
            importers |= {a.asname for a in node.names if a.name in importers and a.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.name, node.lineno) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute("." * node.level + (node.module or ""), package)
            yield from ((base if a.name == "*" else f"{base}.{a.name}", node.lineno) for a in node.names)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if called in importers:
                # of a string that is put together, what it begins with; a name that only a variable holds is taken
                # for the whole package, which no module may import
                yield _absolute(_beginning(node), package).rstrip(".") or package.partition(".")[0], node.lineno


def _beginning(call: ast.Call) -> str:
    text = next((k.value for k in call.keywords if k.arg == "name"), None) if not call.args else call.args[0]
    if isinstance(text, ast.JoinedStr) and text.values:
        text = text.values[0]
    while isinstance(text, ast.BinOp):
        text = text.left
    return str(text.value) if isinstance(text, ast.Constant) else ""


def _absolute(name: str, package: str) -> str:
    level = len(name) - len(name.lstrip("."))
    if not level:
        return name
    base = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join(filter(None, [*base, name[level:]]))


def upward_imports(graph: Graph, layers: Sequence[str]) -> list[str]:
    """The imports of a module or folder by one that stands before it in `layers`, and those that stand nowhere there.

    Args:
        graph: of `import_graph`.
        layers: modules and folders right in the package, from the bottom to the top; `__init__` is the package itself.
    """

    def layer(module: str) -> str:
        return module.split(".")[1] if "." in module else "__init__"

    places = {name: k for k, name in enumerate(layers)}
    missing = sorted({layer(module) for module in graph} - set(layers))
    return [f"{name} is in no layer" for name in missing] + [
        f"{module}:{line} imports {target}"
        for module, targets in graph.items()
        for target, line in targets
        if layer(module) not in missing
        and layer(target) not in missing
        and places[layer(target)] > places[layer(module)]
    ]


def circles(graph: Graph) -> list[list[str]]:
    """The sets of modules that import each other in a loop, each sorted."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for target, _ in graph[waiting.pop()]:
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        reached[start] = seen
    found = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in graph if a in reached[a]}
    return [list(modules) for modules in sorted(found)]
