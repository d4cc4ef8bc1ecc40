"""Check that every relative link and every `path` in the Markdown pages leads to something.

`make check` runs it. Links to other sites are not followed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)]*)?\)")
# Code spans that look like a path of this repository.
PATH = re.compile(r"`((?:src|csrc|tests|tools|docs|benchmarks|\.ci)/[\w./-]+)`")


def tracked_pages() -> list[Path]:
    """Markdown files under version control."""
    listing = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listing.stdout.splitlines()]


def dead_links(page: Path) -> Iterator[str]:
    """Targets that do not exist, relative to the page (links) or the root (code spans)."""
    text = page.read_text(encoding="utf-8")
    for match in LINK.finditer(text):
        target = match.group(1)
        is_local = "://" not in target and not target.startswith("mailto:")
        if is_local and not (page.parent / target).exists():
            yield target
    for match in PATH.finditer(text):
        if not (ROOT / match.group(1)).exists():
            yield match.group(1)


def main() -> int:
    """Print every dead link; exit status 1 when there is one."""
    faults = [(page, link) for page in tracked_pages() for link in dead_links(page)]
    for page, link in faults:
        print(f"{page.relative_to(ROOT)}: {link} leads nowhere")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
