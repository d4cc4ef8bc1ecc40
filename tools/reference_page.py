"""What the tools that write a page of `docs/reference` have in common: write it, or check it."""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "quickstep"


def write_or_check(
    page: Path, text: Callable[[], str], what: str | None, arguments: Sequence[str] | None
) -> int:
    """Write a page, or with `--check` return 1 if the committed page differs."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--check", action="store_true", help="only check whether it is current")
    is_check = parser.parse_args(arguments).check
    if page.exists() and page.read_text(encoding="utf-8") == text():
        return 0
    if is_check:
        print(f"{page.relative_to(ROOT)} is out of date; run make reference")
        return 1
    page.write_text(text(), encoding="utf-8")
    return 0


def cell(text: str) -> str:
    """A text within a table."""
    return " ".join(text.replace("|", "\\|").split())


@cache
def calls() -> list[tuple[Path, ast.Call]]:
    """Every call in the sources, with its file; read once."""
    return [
        (file, node)
        for file in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]


def import_sources() -> None:
    """Have this clone's `quickstep` imported."""
    sys.path.insert(0, str(ROOT / "src"))
