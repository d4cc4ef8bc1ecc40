"""Check that links, anchors, paths and flags in the Markdown pages exist.

`make check` runs it. Links to other sites are not followed. A flag after a `quickstep` command must
be in the help of that command. A design note has a status, and is in the list of notes.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
COMMAND = re.compile(r"quickstep ([a-z]+)\b([^`#\n]*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
# Code spans that look like a path of this repository.
PATH = re.compile(r"`((?:src|csrc|tests|tools|docs|benchmarks|\.ci)/[\w./-]+)`")
# Code spans that look like a source file; they may be relative to these packages.
SOURCE_PATH = re.compile(r"`([a-z_]+(?:/\w+)+\.(?:py|h|cpp))`")
PACKAGE = ROOT / "src" / "quickstep"
PACKAGES = (ROOT, PACKAGE, PACKAGE / "server", PACKAGE / "engine")
NOTES = ROOT / "docs" / "design"
STATUS = re.compile(r"^Status: (current|replaced by \[?\d{4}\b.*)\.$", re.MULTILINE)


def tracked_pages() -> list[Path]:
    """Markdown files under version control."""
    listing = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listing.stdout.splitlines()]


def dead_links(page: Path) -> Iterator[str]:
    """Targets that do not exist, relative to the page (links) or the root (code spans)."""
    text = page.read_text(encoding="utf-8")
    for target, anchor in LINK.findall(text):
        if "://" in target or target.startswith("mailto:"):
            continue
        file = page.parent / target if target else page
        if not file.exists():
            yield target
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield f"{target}#{anchor}"
    for path in PATH.findall(text):
        if not (ROOT / path).exists():
            yield path
    for path in SOURCE_PATH.findall(text) if "results" not in page.parts else ():
        if not any((package / path).exists() for package in PACKAGES):
            yield path


def missing_of_note(page: Path) -> Iterator[str]:
    """What a design note lacks: its status, and its line in the list of notes."""
    if page.parent == NOTES and page.name != "README.md":
        if not STATUS.search(page.read_text(encoding="utf-8")):
            yield "the status"
        if f"]({page.name})" not in (NOTES / "README.md").read_text(encoding="utf-8"):
            yield "the line in docs/design/README.md"


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that the headings of a page get."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    slugs = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return frozenset(slug.replace(" ", "-") for slug in slugs)


def dead_flags(page: Path) -> Iterator[str]:
    """Flags after a `quickstep` command that it does not have."""
    for command, rest in COMMAND.findall(page.read_text(encoding="utf-8")):
        flags = FLAG.findall(rest)
        known = help_of(command) + help_of(command, rest.split()[0]) if flags else ""
        yield from (f"quickstep {command} {flag}" for flag in flags if f"{flag} " not in known)


@functools.cache
def help_of(*command: str) -> str:
    """The text of `quickstep COMMAND --help`; `command` may include a subcommand."""
    sys.path.insert(0, str(ROOT / "src"))
    from quickstep.cli.main import main as quickstep

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        quickstep([*command, "--help"])
    return re.sub(r"[\s,\]=]+", " ", output.getvalue())


def main() -> int:
    """Print every fault; exit status 1 if there is one."""
    faults = [
        (page, fault)
        for page in tracked_pages()
        for check in (dead_links, dead_flags, missing_of_note)
        for fault in check(page)
    ]
    for page, fault in faults:
        print(f"{page.relative_to(ROOT)}: {fault} does not exist")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
