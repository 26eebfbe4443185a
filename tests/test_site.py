"""The documentation site: every page has a place in it. That links lead somewhere is what `mkdocs build` checks."""

from __future__ import annotations

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
    script = "[run](../examples/train.py)"
    assert site_links(script, "contents.md", every) == "run (`examples/train.py`)"
    found = site_links(script, "contents.md", every, "https://host.invalid/project/")
    assert found == "[run](https://host.invalid/project/blob/main/examples/train.py)"
    with pytest.raises(FileNotFoundError, match=r"docs/data\.md: the link to 'no\.md' leads nowhere"):
        site_links("[no](no.md)", "data.md", every)
