"""The hooks of MkDocs that make pages of what lies outside docs: the README, the settings, and files to which pages link.

MkDocs calls the functions ``on_*``; the others do not need it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from asyncdist.base.release import PUBLISHED
from asyncdist.config import Config

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent
ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""The pages outside docs, and their addresses in the site."""
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)\s]*)?\))")
SETTINGS = re.compile(r"<!-- the table of all settings.*-->")
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^(```|~~~).*?^\1$", re.MULTILINE | re.DOTALL)
BOOSTS = {"Start": 4.0, "How to": 4.0, "Reference": 2.0, "Internals": 0.3}
"""By what the search multiplies the scores of the pages of a section of the navigation."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".service": "ini", ".socket": "ini", ".toml": "toml"}


def address_of(path: str) -> str:
    """Return where the site has a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return ROOT_PAGES.get(path) or f"source/{path}.md"


def with_site_links(text: str, path: str) -> str:
    """Return a page whose links between files of the repository are links between pages of the site."""
    here = PurePosixPath(address_of(path)).parent

    def translated(link: re.Match[str]) -> str:
        target = os.path.normpath(PurePosixPath(path).parent / link[2])
        return link[1] + os.path.relpath(address_of(target), here) + link[3]

    parts, end = [], 0
    for block in BLOCK.finditer(text):
        parts += [LINK.sub(translated, text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, LINK.sub(translated, text[end:])])


def linked_files(paths: list[str]) -> set[str]:
    """Return the files outside docs to which pages link."""
    targets = set()
    for path in paths:
        for link in LINK.finditer(BLOCK.sub("", (ROOT / path).read_text(encoding="utf-8"))):
            targets.add(os.path.normpath(PurePosixPath(path).parent / link[2]))
    return {target for target in targets if not target.startswith("docs/") and target not in ROOT_PAGES}


def source_page(path: str) -> str:
    """Return a page that shows a file."""
    language = LANGUAGES.get(PurePosixPath(path).suffix, "text")
    return f"# {path}\n\n~~~~{language}\n{(ROOT / path).read_text(encoding='utf-8')}\n~~~~\n"


def settings_table() -> str:
    """Return the table of all settings."""
    lines = ["| variable | meaning | default | equal on every rank |", "|---|---|---|---|"]
    for setting in fields(Config):
        about = setting.metadata
        default = {None: "", "": "", True: "`1`", False: "`0`"}.get(setting.default, f"`{setting.default}`")
        choices = f"; one of {', '.join(f'`{one}`' for one in about['choices'])}" if about["choices"] else ""
        name = f"`{about['variable']}`{{ #{about['variable'].lower()} }}"
        lines.append(f"| {name} | {about['help']}{choices} | {default} | {'yes' if about['shared'] else ''} |")
    return "\n".join(lines)


def pages() -> Iterator[tuple[str, str]]:
    """Yield the address and the text of each page that is made."""
    documents = [*ROOT_PAGES, *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
    for path in sorted(linked_files(documents)):
        yield address_of(path), source_page(path)
    for path, address in ROOT_PAGES.items():
        yield address, with_site_links((ROOT / path).read_text(encoding="utf-8"), path)


def diagram_path(source: str) -> Path:
    """Return the file of a diagram's drawing, which changes with its source."""
    return ROOT / "docs" / "diagrams" / f"{hashlib.sha256(source.encode()).hexdigest()[:12]}.svg"


def with_drawings(text: str) -> str:
    """Return a page with drawings in place of the sources of its diagrams. The site needs no program that draws them."""

    def drawing(block: re.Match[str]) -> str:
        path = diagram_path(block[1])
        assert path.exists(), "a diagram has changed: run `make diagrams`"
        return f'<div class="diagram">{path.read_text(encoding="utf-8")}</div>'

    return DIAGRAM.sub(drawing, text)


def search_of(page: Page) -> dict[str, object]:
    """Return how the search treats a page: pages for users come first, and files outside docs are left out."""
    folder = PurePosixPath(page.file.src_uri).parts[0]
    section = page.ancestors[-1].title if page.ancestors else ""
    boost = 0.5 if folder == "reference" else BOOSTS.get(section or "", 0.1)  # one entry per name of the reference
    return {"exclude": folder == "source", "boost": boost}


# -- called by MkDocs -------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> None:
    config.site_url = PUBLISHED


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File, InclusionLevel

    for address, text in pages():
        page = File.generated(config, address, content=text)
        if address.startswith("source/"):
            page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    for page in files.documentation_pages():
        if page.src_uri.startswith("decisions/0"):
            page.inclusion = InclusionLevel.NOT_IN_NAV
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    page.meta["search"] = search_of(page)
    if page.file.generated_by is None:
        markdown = with_site_links(markdown, f"docs/{page.file.src_uri}")
    return SETTINGS.sub(lambda _: settings_table(), with_drawings(markdown))
