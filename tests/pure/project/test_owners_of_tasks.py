"""Every task of `src` has an owner that retrieves its exception, read from its source.

`OwnedTasks` retrieves and logs it. Any other task is bound to a name that, in the same function or
class, is awaited, gathered, or read by `result()` or `exception()`: to wait for it with
`asyncio.wait` or `asyncio.shield` is not enough, as the one that waits may be cancelled.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import UnionType

import pytest

import quickstep

SOURCE = Path(quickstep.__file__).parent
FILES = sorted(set(SOURCE.rglob("*.py")) - {SOURCE / "engine" / "owned_tasks.py"})
BEGIN = {"create_task", "ensure_future"}
READ = {"result", "exception"}


def faults(tree: ast.AST) -> Iterator[str]:
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and name_of(node.func).rpartition(".")[2] in BEGIN):
            continue
        statement = around(node, ast.stmt, parents)
        names = [name_of(target) for target in targets_of(statement)]
        scope = around(statement, ast.FunctionDef | ast.AsyncFunctionDef, parents)
        if any(name.startswith("self.") for name in names):
            scope = around(scope, ast.ClassDef, parents)
        if not any(name in set(retrieved(scope)) for name in names):
            yield f"{node.lineno}: nothing retrieves the exception of {names or 'this task'}"


def around(node: ast.AST, kind: type | UnionType, parents: dict[ast.AST, ast.AST]) -> ast.AST:
    """The innermost node of a kind that has this one, or is it."""
    while not isinstance(node, kind):
        node = parents[node]
    return node


def targets_of(statement: ast.AST) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AnnAssign) else []


def name_of(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def retrieved(scope: ast.AST) -> Iterator[str]:
    """The names of what a function or class awaits, gathers or reads."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Await):
            yield name_of(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in READ:
                yield name_of(node.func.value)
            elif node.func.attr == "gather":
                for argument in node.args:
                    starred = isinstance(argument, ast.Starred)
                    yield name_of(argument.value if starred else argument)
            elif node.func.attr == "add_done_callback":
                yield from callback_of(node, scope)


def callback_of(node: ast.Call, scope: ast.AST) -> Iterator[str]:
    """The task of `add_done_callback` with a function of this scope that reads the exception."""
    called = name_of(node.args[0]).rpartition(".")[2]
    for function in ast.walk(scope):
        if isinstance(function, ast.FunctionDef) and function.name == called:
            task = function.args.args[-1].arg
            if task in set(retrieved(function)):
                yield name_of(node.func.value)


def test_every_task_has_an_owner() -> None:
    found = {}
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if "create_task" in text or "ensure_future" in text:
            found[path.relative_to(SOURCE).as_posix()] = list(faults(ast.parse(text)))
    assert {path: lines for path, lines in found.items() if lines} == {}
    assert len(found) > 10


FORGOTTEN = [
    "asyncio.create_task(work())",
    "task = asyncio.create_task(work())\ntasks.add(task)\ntask.add_done_callback(tasks.discard)",
    "task = asyncio.ensure_future(work())\nawait asyncio.shield(task)",
    "task = loop.create_task(work())\nawait asyncio.wait({task})",
    "return asyncio.create_task(work())",
]
OWNED = [
    "task = asyncio.create_task(work())\nawait task",
    "task = asyncio.create_task(work())\nawait asyncio.wait({task})\nreturn task.result()",
    "tasks = [asyncio.create_task(work())]\nawait asyncio.gather(*tasks)",
    "task = asyncio.create_task(work())\n\ndef ended(task):\n    task.exception()\n\n"
    "task.add_done_callback(ended)",
]


def faults_in(lines: str) -> list[str]:
    return list(faults(ast.parse(f"async def run():\n{textwrap.indent(lines, '    ')}")))


@pytest.mark.parametrize("lines", FORGOTTEN)
def test_a_task_without_an_owner_is_found(lines: str) -> None:
    assert len(faults_in(lines)) == 1


@pytest.mark.parametrize("lines", OWNED)
def test_a_task_with_an_owner_is_none(lines: str) -> None:
    assert faults_in(lines) == []
