"""Check that names are specific: no `utils.py`, no `RequestManager`, no loop over `one`, no class
name that means two things, and a list of exports in public modules only. `make check` runs it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "csrc", "tests", "tools", "benchmarks")
SUFFIXES = {".py", ".cpp", ".h", ".hpp"}
VAGUE_FILE = re.compile(r"^(.*_)?(utils?|helpers?|common|misc|base|manager|handler|processor)$")
# A class name of `src` means one thing; a private one means one thing in its package.
SOURCE = ROOT / "src"
# Modules that may list what they export: the package, and what it takes from elsewhere.
PUBLIC = ("src/quickstep/__init__.py", "src/quickstep/types.py")
# Folders whose loops name their noun.
NAMED_LOOPS = ("benchmarks", "src")
VAGUE_CLASS = re.compile(r"(Manager|Handler|Helper|Utils?|Processor|Base|Mixin)$")


def faults_of(path: Path) -> Iterator[tuple[int, str]]:
    """Vague names in one file, as (line, message)."""
    if VAGUE_FILE.match(path.stem):
        yield 1, f"the file name {path.stem} is too vague"
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and VAGUE_CLASS.search(node.name):
                yield node.lineno, f"the class name {node.name} is too vague"


def list_of_exports(path: Path) -> Iterator[tuple[int, str]]:
    """An `__all__` of a module that is not public, as (line, message)."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            yield node.lineno, "`__all__` is for public modules"


def loops_over_one(path: Path) -> Iterator[tuple[int, str]]:
    """Loops and comprehensions of one file whose variable is `one`, as (line, message)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        is_loop = isinstance(node, ast.For | ast.AsyncFor | ast.comprehension)
        if is_loop and isinstance(node.target, ast.Name) and node.target.id == "one":
            yield node.target.lineno, "a loop over `one`: name the noun"


def classes_named_twice() -> Iterator[str]:
    """Names of classes that are defined in several modules, with these modules; private ones in
    several modules of a package.
    """
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        package = path.parent.relative_to(SOURCE).as_posix()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                is_private = node.name.startswith("_")
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                places[node.name, package if is_private else ""].append(place)
    twice = {name: found for (name, _), found in places.items() if len(found) > 1}
    for name, found in twice.items():
        yield f"{found[-1]}: the class name {name} is also in {', '.join(found[:-1])}"


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
    for folder in NAMED_LOOPS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, message in loops_over_one(path):
                print(f"{path.relative_to(ROOT)}:{line}: {message}")
                num_faults += 1
    for path in sorted(SOURCE.rglob("*.py")):
        if path.relative_to(ROOT).as_posix() not in PUBLIC:
            for line, message in list_of_exports(path):
                print(f"{path.relative_to(ROOT)}:{line}: {message}")
                num_faults += 1
    for message in classes_named_twice():
        print(message)
        num_faults += 1
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
