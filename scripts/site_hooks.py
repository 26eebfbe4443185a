"""Hooks of mkdocs: pages at the top of the repository (README, CHANGELOG …) become pages of the site, with right links.

On the site README.md is the first page, without its badges, and docs/README.md the table of contents. A link to a file
that is no page (an example, a test) becomes its path as code, or a link into the repository where mkdocs.yml has a
`repo_url`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {  # page of the site -> file of the repository
    "index.md": "README.md",
    "contents.md": "docs/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
}
_PAGE_OF = {source: page for page, source in PAGES.items()}
_CODE = r"^```.*?^```|`[^`\n]*`"  # not changed
_BADGES = re.compile(r"^(?:\[!\[[^]]*\]\(https?:[^)]*\)\]\([^)]*\)\n)+\n", re.MULTILINE)  # pictures of another host
_LINK = re.compile(_CODE + r"|\[([^\]\[]*)\]\(([^)\s]+)\)", re.DOTALL | re.MULTILINE)  # pictures too


def site_links(markdown: str, page: str, pages: Container[str], repository: str | None = None) -> str:
    """A page with its links between files of the repository made links between pages of the site.

    Args:
        markdown: as in the repository.
        page: its path on the site, "dev/bars.md".
        pages: the paths of all pages of the site.
        repository: address of the repository, for links to other files.

    Raises:
        FileNotFoundError: a link leads nowhere.
    """
    here = PAGES.get(page, f"docs/{page}")

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        if target is None or "://" in target or target.startswith(("#", "mailto:")):
            return match.group()
        path, mark, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        found = _PAGE_OF.get(path, path.removeprefix("docs/"))
        if found in pages:
            return f"[{text}]({posixpath.relpath(found, posixpath.dirname(page) or '.')}{mark}{anchor})"
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{here}: the link to '{target}' leads nowhere")
        if repository:
            return f"[{text}]({repository.rstrip('/')}/blob/main/{path})"
        return text if path.split("/")[-1] in text else f"{text} (`{path}`)"

    return _LINK.sub(link, _BADGES.sub("", markdown))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the top of the repository."""
    from mkdocs.structure.files import File

    files.remove(files.src_uris["README.md"])
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site needs them."""
    return site_links(markdown, page.file.src_uri, files.src_uris, config.repo_url)
