"""Check the size ceilings: lines a file, lines a function, nesting, names that say nothing.

`make check` runs it; ruff checks complexity, parameters and columns. A file may have up to 600
lines with a line `# ceiling: <reason>` near its top; a function up to 100 with the same comment
on the line above its `def`. C++ and Triton kernels are exempt from the function ceiling.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "csrc", "tests", "tools", "benchmarks")
FILE_LINES, FILE_LINES_WITH_REASON = 400, 600
FUNCTION_LINES, FUNCTION_LINES_WITH_REASON = 60, 100
NESTING = 3
COLUMNS = 100
VAGUE_FILE = re.compile(r"^(.*_)?(utils?|helpers?|common|misc|base|manager|handler|processor)$")
VAGUE_CLASS = re.compile(r"(Manager|Handler|Helper|Utils?|Processor|Base|Mixin)$")
REASON = re.compile(r"#\s*ceiling: \S+|//\s*ceiling: \S+")
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def nesting(body: list[ast.stmt], depth: int = 0) -> int:
    """Deepest block nesting below `body`; `elif` chains and nested functions count once."""
    deepest = depth
    for statement in body:
        if not isinstance(statement, BLOCKS):
            continue
        deepest = max(deepest, depth + 1)
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(statement, name, [])
            is_elif = name == "orelse" and len(inner) == 1 and isinstance(inner[0], ast.If)
            deepest = max(deepest, nesting(inner, depth if is_elif else depth + 1))
        for branch in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
            deepest = max(deepest, nesting(branch.body, depth + 1))
    return deepest


def check_python(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Faults of functions and classes, as (line, message)."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and VAGUE_CLASS.search(node.name):
            yield node.lineno, f"class {node.name}: say what it is"
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        length = (node.end_lineno or node.lineno) - first + 1
        reason = first >= 2 and REASON.search(lines[first - 2])
        ceiling = FUNCTION_LINES_WITH_REASON if reason else FUNCTION_LINES
        is_kernel = any("jit" in ast.unparse(d) for d in node.decorator_list)
        if length > ceiling and not is_kernel:
            yield node.lineno, f"{node.name} has {length} lines, the ceiling is {ceiling}"
        depth = nesting(node.body)
        if depth > NESTING:
            yield node.lineno, f"{node.name} nests {depth} deep, the ceiling is {NESTING}"


def check_file(path: Path) -> Iterator[tuple[int, str]]:
    """Every fault of one file."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    reason = any(REASON.search(line) for line in lines[:30])
    ceiling = FILE_LINES_WITH_REASON if reason else FILE_LINES
    if len(lines) > ceiling:
        yield 1, f"{len(lines)} lines, the ceiling is {ceiling}"
    if VAGUE_FILE.match(path.stem):
        yield 1, f"the file name {path.stem} does not say what it holds"
    for number, line in enumerate(lines, 1):
        if len(line) > COLUMNS:
            yield number, f"{len(line)} columns, the ceiling is {COLUMNS}"
    if path.suffix == ".py":
        yield from check_python(path, text)


def main() -> int:
    """Print every fault as `file:line: message`; exit status 1 when there is one."""
    faults = 0
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in {".py", ".cpp", ".h", ".hpp"}:
                continue
            for line, message in check_file(path):
                print(f"{path.relative_to(ROOT)}:{line}: {message}")
                faults += 1
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
