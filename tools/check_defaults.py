"""Check that the default of an option is written once: at the field that declares it.

A fault is a parameter, a field or a flag elsewhere in `src` that has the name of a declared option
and the option's default as a literal, and a help text that writes a default out. `make check` runs
it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quickstep.option import Declared

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "quickstep"
DECLARING = (SOURCE / "config.py", SOURCE / "server" / "options.py")
WRITTEN_OUT = re.compile(r"\(default: -?[0-9.]+[A-Za-z]*\)")
# Values that say nothing about where they come from.
USUAL = (None, False, True, "", (), 0, 1, "auto")


def declarations() -> Iterator[Declared]:
    """Every declared option."""
    sys.path.insert(0, str(ROOT / "src"))
    import msgspec

    from quickstep import config
    from quickstep.option import options_of
    from quickstep.server import options

    for module in (config, options):
        for section in vars(module).values():
            is_struct = isinstance(section, type) and issubclass(section, msgspec.Struct)
            if is_struct and section.__module__ == module.__name__:
                yield from options_of(section).values()


def value_of(node: ast.expr | None) -> object:
    """The value of a literal, products of numbers included; None for other expressions."""
    if node is None:
        return None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = value_of(node.left), value_of(node.right)
        are_numbers = isinstance(left, int | float) and isinstance(right, int | float)
        return left * right if are_numbers else None  # type: ignore[operator]
    try:
        value: object = ast.literal_eval(node)
    except ValueError:
        return None
    return value


def named_defaults(tree: ast.AST) -> Iterator[tuple[int, str, object]]:
    """The literal defaults of parameters, fields and flags, as (line, name, value)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            plain = [*node.args.posonlyargs, *node.args.args]
            with_default = plain[len(plain) - len(node.args.defaults) :]
            pairs = [
                *zip(with_default, node.args.defaults, strict=True),
                *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
            ]
            for parameter, default in pairs:
                yield node.lineno, parameter.arg, value_of(default)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.lineno, node.target.id, value_of(node.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            flags = [value_of(argument) for argument in node.args]
            defaults = [word.value for word in node.keywords if word.arg == "default"]
            for flag in flags:
                if isinstance(flag, str) and flag.startswith("--") and defaults:
                    yield node.lineno, flag[2:].replace("-", "_"), value_of(defaults[0])


def faults_of(tree: ast.AST, known: dict[str, list[Declared]]) -> Iterator[tuple[int, str]]:
    """Defaults in a module that are written a second time, as (line, message)."""
    for line, name, value in named_defaults(tree):
        for declared in known.get(name, []):
            is_same = type(value) is type(declared.default) and value == declared.default
            if is_same and value not in USUAL:
                yield line, f"{name} has the default of {declared.flag}: take it from there"
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            written = WRITTEN_OUT.search(node.value)
            if written:
                yield node.lineno, f"a help text writes out {written.group()}: derive it"


def known_options() -> dict[str, list[Declared]]:
    """The declared options by the names of their fields, flags and arguments."""
    known: dict[str, list[Declared]] = {}
    for declared in declarations():
        for name in {declared.field, declared.name, *declared.arguments}:
            known.setdefault(name, []).append(declared)
    return known


def main() -> int:
    """Print the faults. Returns the exit code."""
    known = known_options()
    num_faults = 0
    for path in sorted(SOURCE.rglob("*.py")):
        if path in DECLARING:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, message in faults_of(tree, known):
            print(f"{path.relative_to(ROOT)}:{line}: {message}")
            num_faults += 1
    return int(num_faults > 0)


if __name__ == "__main__":
    sys.exit(main())
