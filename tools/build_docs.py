"""Build a searchable site of all Markdown pages: `make docs`, in an environment of its own.

The pages keep their places in the repository, so that links between them are right as they are. A
link that leads nowhere, a page that no list has, and every other warning of Sphinx is an error.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from check_docs import LINK, ROOT, tracked_pages

SITE = ROOT / "build" / "docs"
SOURCE = SITE / "source"
OUTPUT = SITE / "html"
# What the menu has, in order; a name that ends in / is all other pages of a folder.
SECTIONS: Mapping[str, Sequence[str]] = {
    "Start": ("docs/guide/python.md", "docs/guide/serve.md", "docs/guide/troubleshooting.md"),
    "Guides": ("docs/guide/", "examples/"),
    "Operation": ("deploy/",),
    "Reference": ("docs/reference/", "docs/glossary.md"),
    "Background": (
        "docs/claims.md",
        "docs/guide/why/README.md",
        "docs/guide/why/",
        "ARCHITECTURE.md",
    ),
    "Design": ("docs/design/README.md", "docs/design/"),
    "Results": ("benchmarks/results/",),
    "Project": ("CONTRIBUTING.md", "CHANGELOG.md", ""),
}


def copy_pages(pages: Sequence[Path]) -> None:
    """Copy the pages and the files that they link to."""
    for page in pages:
        text = page.read_text(encoding="utf-8")
        copied = SOURCE / page.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(with_file_links(page, text), encoding="utf-8")
        for target, _ in LINK.findall(text):
            file = (page.parent / target).resolve()
            if target and "://" not in target and file.is_file() and file.suffix != ".md":
                linked = SOURCE / file.relative_to(ROOT)
                linked.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, linked)


def with_file_links(page: Path, text: str) -> str:
    """A link to a folder as one to its page; a folder without one gets a list of its pages."""

    def replaced(match: re.Match[str]) -> str:
        target = match[1]
        folder = (page.parent / target).resolve()
        if not target or "://" in target or not folder.is_dir():
            return match[0]
        index = SOURCE / folder.relative_to(ROOT) / "README.md"
        if not (folder / "README.md").exists() and not index.exists():
            index.parent.mkdir(parents=True, exist_ok=True)
            names = sorted(file.name for file in folder.glob("*.md"))
            lines = [f"- [{name.removesuffix('.md')}]({name})" for name in names]
            index.write_text(f"# {folder.relative_to(ROOT)}\n\n" + "\n".join(lines) + "\n")
        return match[0].replace(f"({target}", f"({target.rstrip('/')}/README.md", 1)

    return LINK.sub(replaced, text)


def add_menu() -> None:
    """The lists of pages, which the first page has but does not show."""
    copied = sorted(str(page.relative_to(SOURCE)) for page in SOURCE.rglob("*.md"))
    left = [name for name in copied if name != "README.md"]
    menu = []
    # a folder has what no section names by itself
    named = {name for names in SECTIONS.values() for name in names if name.endswith(".md")}
    for title, names in SECTIONS.items():
        chosen = []
        for name in names:
            if name.endswith(".md"):
                found = [name]
            else:
                deeper = "/" if name else "//"  # the last one takes all that is left
                found = [
                    page
                    for page in left
                    if page.startswith(name)
                    and page not in named
                    and deeper not in page.removeprefix(name)
                ]
            chosen += found
            left = [page for page in left if page not in found]
        entries = "\n".join(page.removesuffix(".md") for page in chosen)
        menu.append(f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n{entries}\n```\n")
    first = SOURCE / "README.md"
    first.write_text(first.read_text("utf-8") + "\n" + "\n".join(menu), encoding="utf-8")


def main() -> int:
    """Build the site; exit status 1 if Sphinx has a warning."""
    shutil.rmtree(SITE, ignore_errors=True)
    copy_pages(tracked_pages())
    add_menu()
    command = ["-m", "sphinx", "-W", "--keep-going", "-q", "-c", str(ROOT / "docs")]
    done = subprocess.run([sys.executable, *command, str(SOURCE), str(OUTPUT)])
    if done.returncode == 0:
        first = OUTPUT / "index.html"
        first.write_text('<meta http-equiv="refresh" content="0; url=README.html">\n')
        print(f"open {first.relative_to(ROOT)}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
