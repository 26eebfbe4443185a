"""The code in README.md and docs/ runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def block(page: str, name: str) -> str:
    """The code block that follows the comment <!-- name -->."""
    found = re.search(rf"<!-- {name} -->\n```\w*\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert found, f"{page} has no code block named {name}"
    return found[1]


@pytest.mark.parametrize("name", ["prior", "model"])
def test_extending(name, monkeypatch):
    from torchmdnet2.registry import PRIORS, REPRESENTATIONS, load_builtin

    load_builtin()
    for registry in (PRIORS, REPRESENTATIONS):
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    code = block("docs/extending.md", name)
    assert "check_p" in code.splitlines()[-1]
    body = code[code.index("@") :]
    assert len([line for line in body.splitlines() if line.strip()]) <= 30
    exec(compile(code, f"docs/extending.md:{name}", "exec"), {"__name__": "docs"})


def test_readme_python(tmp_path, monkeypatch):
    from ase.build import molecule
    from tiny import tiny_potential

    from torchmdnet2.checkpoint import save

    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples" / "data").mkdir(parents=True)
    molecule("CH3CH2OH").write(tmp_path / "examples" / "data" / "ethanol_gfn2.xyz")
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    save(tiny_potential(), tmp_path / "runs" / "quickstart" / "best.tmn")
    code = block("README.md", "python")
    assert len(code.splitlines()) <= 20
    exec(compile(code, "README.md", "exec"), {"__name__": "docs"})


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs"])
def test_links_lead_somewhere(page):
    pages = sorted((ROOT / page).glob("*.md")) if page == "docs" else [ROOT / page]
    for path in pages:
        for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}"
