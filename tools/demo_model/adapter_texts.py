"""The texts that the LoRA adapters of the demo model learn, made from the standard library.

    docstrings    functions whose docstring has a section with each argument
    annotations   functions with annotated arguments and results
    sql           SQL statements, each with a comment that says what it does

Called by `adapters`. All texts are functions of the corpus and a seed.
"""

import ast
import random
import textwrap
from collections.abc import Callable, Iterator

from tools.demo_model.corpus import Corpus

_NAMED_TYPES = {
    "name": "str",
    "path": "str",
    "filename": "str",
    "text": "str",
    "string": "str",
    "prefix": "str",
    "suffix": "str",
    "key": "str",
    "msg": "str",
    "url": "str",
    "encoding": "str",
    "data": "bytes",
    "size": "int",
    "n": "int",
    "count": "int",
    "index": "int",
    "start": "int",
    "stop": "int",
    "end": "int",
    "limit": "int",
    "timeout": "float",
    "items": "list[object]",
    "args": "tuple[object, ...]",
    "kwargs": "dict[str, object]",
    "func": "Callable[..., object]",
    "iterable": "Iterable[object]",
}
_RESULT_TYPES: tuple[tuple[type[ast.expr], str], ...] = (
    (ast.Compare, "bool"),
    (ast.JoinedStr, "str"),
    (ast.Dict, "dict[str, object]"),
    (ast.DictComp, "dict[str, object]"),
    (ast.List, "list[object]"),
    (ast.ListComp, "list[object]"),
    (ast.Tuple, "tuple[object, ...]"),
)
_TABLES = {
    "users": ("id", "name", "email", "age", "city"),
    "orders": ("id", "user_id", "total", "status", "created_at"),
    "products": ("id", "name", "price", "stock", "category"),
    "events": ("id", "kind", "user_id", "started_at", "duration"),
    "books": ("id", "title", "author", "year", "pages"),
    "employees": ("id", "name", "salary", "department", "hired_at"),
}
_CONDITIONS = {
    "= {v}": "is {v}",
    "> {v}": "is above {v}",
    "< {v}": "is below {v}",
    ">= {v}": "is at least {v}",
    "IS NOT NULL": "is known",
}


def texts(corpus: Corpus, seed: int) -> dict[str, list[str]]:
    """The texts of each adapter, by its name."""
    rng = random.Random(seed)
    functions = [pair for document in corpus.library for pair in _functions(document.text)]
    return {
        "docstrings": list(_rewritten(functions, _with_arguments)),
        "annotations": list(_rewritten(functions, _with_annotations)),
        "sql": [_statement(rng) for _ in range(20_000)],
    }


_Function = tuple[str, ast.FunctionDef]


def _functions(text: str) -> Iterator[_Function]:
    """The functions of a file with their source, those in classes included."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno > node.lineno:
            yield textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])), node


def _rewritten(
    functions: list[_Function], rewrite: Callable[[str, ast.FunctionDef], str]
) -> Iterator[str]:
    for source, node in functions:
        changed = rewrite(source, node)
        if changed and len(changed) < 1500:
            yield changed


def _parts(source: str, node: ast.FunctionDef) -> tuple[str, str]:
    """The lines before the body and those after the docstring."""
    lines = source.splitlines(keepends=True)
    first = node.body[0]
    has_docstring = ast.get_docstring(node) is not None
    after = (first.end_lineno or first.lineno) if has_docstring else first.lineno - 1
    return (
        "".join(lines[: first.lineno - node.lineno]),
        "".join(lines[after - node.lineno + 1 :]),
    )


def _arguments(node: ast.FunctionDef) -> list[tuple[ast.arg, ast.expr | None]]:
    """Arguments and their defaults, without `self` and `cls`."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    found = [*zip(positional, defaults, strict=True)]
    found += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [
        (argument, default) for argument, default in found if argument.arg not in ("self", "cls")
    ]


def _with_arguments(source: str, node: ast.FunctionDef) -> str:
    """With a docstring that has a section `Args:`; "" for functions without arguments."""
    arguments = _arguments(node)
    docstring = (ast.get_docstring(node) or "").strip().split("\n")[0]
    if not arguments or not 8 <= len(docstring) <= 90:
        return ""
    header, body = _parts(source, node)
    lines = [f'    """{docstring}', "", "    Args:"]
    for argument, default in arguments:
        text = f"The {argument.arg.strip('_').replace('_', ' ')}"
        if default is not None:
            text += f", {ast.unparse(default)} by default"
        lines.append(f"        {argument.arg}: {text}.")
    if _returns_value(node):
        lines += ["", "    Returns:", "        The result."]
    return header + "\n".join([*lines, '    """', ""]) + body


def _with_annotations(source: str, node: ast.FunctionDef) -> str:
    """With the type of each argument and of the result, guessed from names and values."""
    if node.decorator_list or node.returns is not None:
        return ""
    for argument, default in _arguments(node):
        argument.annotation = ast.Name(_argument_type(argument.arg, default))
    if node.args.vararg is not None:
        node.args.vararg.annotation = ast.Name("object")
    if node.args.kwarg is not None:
        node.args.kwarg.annotation = ast.Name("object")
    _, body = _parts(source, node)
    docstring = (ast.get_docstring(node) or "").strip().split("\n")[0]
    summary = f'    """{docstring}"""\n' if docstring else ""
    return f"def {node.name}({ast.unparse(node.args)}) -> {_result_type(node)}:\n{summary}{body}"


def _argument_type(name: str, default: ast.expr | None) -> str:
    if isinstance(default, ast.Constant) and default.value is not None:
        return type(default.value).__name__
    known = _NAMED_TYPES.get(name, "object")
    return f"{known} | None" if isinstance(default, ast.Constant) else known


def _returns_value(node: ast.FunctionDef) -> bool:
    return any(isinstance(one, ast.Return) and one.value is not None for one in ast.walk(node))


def _result_type(node: ast.FunctionDef) -> str:
    results = [one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value]
    if not results:
        return "None"
    if node.name in ("__str__", "__repr__"):
        return "str"
    last = results[-1]
    if isinstance(last, ast.Constant):
        return "None" if last.value is None else type(last.value).__name__
    return next((name for kind, name in _RESULT_TYPES if isinstance(last, kind)), "object")


def _statement(rng: random.Random) -> str:
    table = rng.choice(sorted(_TABLES))
    columns = rng.sample(_TABLES[table], rng.randint(1, 3))
    listed, spoken = ", ".join(columns), " and ".join(columns).replace("_", " ")
    kind = rng.choice(("select", "select", "select", "count", "delete", "update", "insert"))
    if kind == "insert":
        values = ", ".join("?" for _ in columns)
        return f"INSERT INTO {table} ({listed}) VALUES ({values});  -- add to {table}: {spoken}\n"
    column = rng.choice(_TABLES[table])
    operator = rng.choice(sorted(_CONDITIONS))
    value = str(rng.choice((1, 5, 10, 18, 100, 1000, 2020)))
    where = f"WHERE {column} {operator.format(v=value)}"
    when = f"where {column.replace('_', ' ')} {_CONDITIONS[operator].format(v=value)}"
    if kind == "delete":
        return f"DELETE FROM {table} {where};  -- remove {table} {when}\n"
    if kind == "update":
        changed = rng.choice(_TABLES[table][1:])
        return f"UPDATE {table} SET {changed} = ? {where};  -- change {changed} of {table} {when}\n"
    if kind == "count":
        return f"SELECT COUNT(*) FROM {table} {where};  -- how many {table} {when}\n"
    order = rng.choice(("", f" ORDER BY {columns[0]}"))
    sorted_by = f", by {columns[0].replace('_', ' ')}" if order else ""
    return (
        f"SELECT {listed} FROM {table} {where}{order};  -- {spoken} of {table} {when}{sorted_by}\n"
    )
