"""Check that names are specific: no `utils.py`, no `RequestManager`. `make check` runs it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "csrc", "tests", "tools", "benchmarks")
SUFFIXES = {".py", ".cpp", ".h", ".hpp"}
VAGUE_FILE = re.compile(r"^(.*_)?(utils?|helpers?|common|misc|base|manager|handler|processor)$")
VAGUE_CLASS = re.compile(r"(Manager|Handler|Helper|Utils?|Processor|Base|Mixin)$")


def faults_of(path: Path) -> Iterator[tuple[int, str]]:
    """Vague names in one file, as (line, message)."""
    if VAGUE_FILE.match(path.stem):
        yield 1, f"the file name {path.stem} is too vague"
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and VAGUE_CLASS.search(node.name):
                yield node.lineno, f"the class name {node.name} is too vague"


def main() -> int:
    """Print every fault as `file:line: message`; exit status 1 if there is one."""
    num_faults = 0
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in SUFFIXES:
                continue
            for line, message in faults_of(path):
                print(f"{path.relative_to(ROOT)}:{line}: {message}")
                num_faults += 1
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
