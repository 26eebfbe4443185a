"""The documentation site: every page has a place in it. That links lead somewhere is what `mkdocs build` checks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
OWN = {"index.md", "contents.md", "contributing.md", "changelog.md", "security.md"}  # of the repository's other pages


def pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(entry)


def test_every_page_is_in_the_navigation():
    listed = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert len(listed) == len(set(listed))
    assert set(listed) == written | OWN


def test_links_between_files_of_the_repository(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from site_hooks import site_links

    every = {"data.md", "dev/bars.md", *OWN}
    assert site_links("[data](docs/data.md#a) `[x](y)`", "index.md", every) == "[data](data.md#a) `[x](y)`"
    both = "[home](../../README.md) [data](../data.md)"
    assert site_links(both, "dev/bars.md", every) == "[home](../index.md) [data](../data.md)"
    assert site_links("![plot](docs/bench/a.png)", "index.md", {"bench/a.png"}) == "![plot](bench/a.png)"
    badge = "# name\n\n[![MIT](https://host.invalid/MIT)](LICENSE)\n\nText\n"
    assert site_links(badge, "index.md", every) == "# name\n\nText\n"  # no requests to other hosts
    script = "[run](../examples/train.py)"
    assert site_links(script, "contents.md", every) == "run (`examples/train.py`)"
    found = site_links(script, "contents.md", every, "https://host.invalid/project/")
    assert found == "[run](https://host.invalid/project/blob/main/examples/train.py)"
    with pytest.raises(FileNotFoundError, match=r"docs/data\.md: the link to 'no\.md' leads nowhere"):
        site_links("[no](no.md)", "data.md", every)


def source_of(module: str, name: str) -> tuple[str, ast.AST]:
    """The module that defines a name, through imports of packages, and its definition."""
    folder = ROOT / module.replace(".", "/")
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and any(name == (alias.asname or alias.name) for alias in node.names):
            package = module if folder.is_dir() else module.rpartition(".")[0]
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            original = next(alias.name for alias in node.names if name == (alias.asname or alias.name))
            return source_of(".".join([*parts, *([node.module] if node.module else [])]), original)
    raise LookupError(f"{module} has no {name}")


def functions() -> Iterator[tuple[str, ast.FunctionDef, str]]:
    """Name, definition and docstring of the functions and methods with a docstring on the pages of docs/api.

    A constructor is documented by its class.
    """
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for target, members in re.findall(r"^::: (\S+)(?:\n +options: {members: \[(.*?)\])?", text, re.MULTILINE):
            pairs = [(target, m) for m in members.split(", ")] if members else [tuple(target.rsplit(".", 1))]
            for module, name in pairs:
                node = source_of(module, name)[1]
                if isinstance(node, ast.FunctionDef):
                    yield f"{page.stem}: {name}", node, ast.get_docstring(node) or ""
                    continue
                for method in (part for part in node.body if isinstance(part, ast.FunctionDef)):
                    own = ast.get_docstring(node if method.name == "__init__" else method)
                    if method.name == "__init__" or not method.name.startswith("_"):
                        yield f"{page.stem}: {name}.{method.name}", method, own or ""


def lacking(function: ast.FunctionDef, text: str) -> list[str]:
    """Arguments that a docstring does not describe."""
    taken = function.args
    names = [argument.arg for argument in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
    names = [name for name in names if name not in ("self", "cls")]
    described = re.findall(r"^ +([\w, *]+)(?: \([^)]*\))?: ", text.partition("Args:\n")[2], re.MULTILINE)
    return sorted(set(names) - {name.strip(" *") for line in described for name in line.split(",")})


def test_functions_of_the_api_reference_describe_their_arguments():
    every = list(functions())
    assert len(every) > 100
    missing = {name: found for name, function, text in every if text and (found := lacking(function, text))}
    assert not missing, "\n".join(f"{name}: {', '.join(found)}" for name, found in missing.items())
