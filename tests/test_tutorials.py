"""The tutorials run, with the fewer steps that pages name for tests, and print what they show, numbers aside."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from warm import warm_python

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in (ROOT / "docs" / "tutorials").glob("*.md"))
LARGEST = 60_000  # bytes of a picture


@pytest.fixture(scope="module")
def tutorials():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import tutorials
    finally:
        sys.path.pop(0)
    return tutorials


@pytest.fixture(scope="module")
def ran(tutorials, tmp_path_factory):
    """Runs a page, and before it those whose files it uses; gives its text, outputs and the folder."""
    pytest.importorskip("matplotlib")
    work, done, python = tmp_path_factory.mktemp("tutorials"), {}, warm_python()
    tutorials.prepare(work, 1, python)

    def run(name):
        if name not in done:
            text = tutorials.shorter(tutorials.page(name))
            for earlier in set(tutorials.after(text)) - {"quickstart"}:
                run(earlier)
            part = tutorials.runnable(text)
            done[name] = part, tutorials.run(part, work, name, python)
        return (*done[name], work)

    return run


def words(text: str) -> str:
    """A text without its numbers and spaces."""
    return re.sub(r"[-+−]?\d[\d.,e+-]*|[\s─━┃│]", "", text)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_page(name, tutorials, ran):
    text, printed, work = ran(name)
    assert words(tutorials.shown(text, printed)) == words(text)
    for picture in tutorials.pictures(text):
        assert (work / picture).read_bytes()[:4] == b"\x89PNG"
    if lacking := tutorials.missing(tutorials.page(name)):
        pytest.skip(f"not installed: {', '.join(lacking)}; what does not need it ran")


@pytest.mark.parametrize("name", NAMES)
def test_pages_end_in_small_pictures(name, tutorials):
    text = tutorials.page(name)
    shown = tutorials.pictures(text)
    assert shown and tutorials.blocks(text)
    for picture in shown:
        file = tutorials.PAGES / picture
        assert file.read_bytes()[:4] == b"\x89PNG" and file.stat().st_size <= LARGEST
        assert f'savefig("{picture}"' in text


def test_pages_in_tests_differ_in_numbers_only(tutorials):
    for name in NAMES:
        text = tutorials.page(name)
        assert words(tutorials.shorter(text)) == words(text)
    with pytest.raises(ValueError, match="no block has 'epochs: 9'"):
        tutorials.shorter('<!-- in tests: epochs: 9 | epochs: 1 -->\n\n```yaml title="a"\nepochs: 8\n```\n')


def test_blocks_run_in_order_with_the_lines_of_the_page(tutorials, tmp_path):
    page = (
        'A page\n\n```python\na = 1\nprint("one")\n```\n\n```text\nold\n```\n\n```yaml title="f.txt"\nk: 1\n```\n'
        "```sh\ncat f.txt\n```\n\n```text\n```\n\n<!-- needs: json -->\n```python\nprint(a + 1)\n```\n"
        "<!-- needs: no_such_module -->\n```python\nraise ValueError\n```\n"
    )
    part = tutorials.runnable(page)
    assert tutorials.missing(page) == ["no_such_module"] and page.startswith(part) and "ValueError" not in part
    printed = tutorials.run(part, tmp_path)
    assert printed == ["one\n", "", "k: 1\n", "2\n"]
    new = tutorials.shown(part, printed)
    assert "```text\none\n```" in new and "```text\nk: 1\n```" in new and "old" not in new
    assert tutorials.shown(new, printed) == new
    with pytest.raises(RuntimeError, match=rf"page\.py\", line {page.splitlines().index('raise ValueError') + 1},"):
        tutorials.run(page, tmp_path)
    with pytest.raises(RuntimeError):  # a failed command ends the page
        tutorials.run("```sh\nfalse | cat\n```\n", tmp_path)
