"""Jinja's immutable sandbox with limits of time and size, so that no template blocks a request.

Jinja's own sandbox isolates a template from Python, but does not limit its time or memory. Here
every iteration of a loop, every call, filter and test checks the clock, and every operation that
can make a text or a number large at once (`*`, `**`, `~`, `+`, `%`, `replace`, `join`, widths) is
measured first. Loops and `~` become calls of the environment when the template is parsed.

A template is untrusted, as it comes with a checkpoint. Without these limits it could allocate any
amount of memory in one expression, which no deadline of the caller would stop.
"""

from __future__ import annotations

import functools
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import BuiltinMethodType
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_MAX_CHARS = 64 * 1024 * 1024
_MAX_BITS = 100_000
_MAX_WIDTH = 10_000
_MAX_INDENT = 16
_WIDE = re.compile(r"\d{5,}")
# their arguments are a width or a count
_WIDENING_FILTERS = frozenset({"batch", "center", "indent", "slice"})
_WIDENING_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})


class _Clock(threading.local):
    """The deadline of each thread's render."""

    deadline_s = math.inf
    limit_s = math.inf


class TemplateLimit(Exception):
    """The template takes too long, or its values are too large."""


class _MeasuredNodes(NodeTransformer):
    """Calls `tick` in each iteration of a loop, and `concat_values` for `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick", [], node), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_call("tick", [], node), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concat_values", node.nodes, node)


def _call(method: str, args: list[nodes.Expr], place: nodes.Node) -> nodes.Call:
    """A call of a method of the environment."""
    function = nodes.EnvironmentAttribute(method, lineno=place.lineno)
    return nodes.Call(function, args, [], None, None, lineno=place.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """One checkpoint's environment; several threads may render in it. `clock` gives the seconds of
    the calling thread.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, clock: Callable[[], float], extensions: Sequence[type[Extension]]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self._clock = clock
        self._local = _Clock()
        tests: Mapping[str, Any] = self.tests
        self.tests = {name: self._ticking(test) for name, test in tests.items()}

    def bound_filters(self) -> None:
        """Measure the filters; called once all of them are defined."""
        self.filters = {
            name: self._ticking(_measured(name, function))
            for name, function in self.filters.items()
        }

    @contextmanager
    def within(self, limit_s: float) -> Iterator[None]:
        """Limit the time of the block."""
        self._local.deadline_s = self._clock() + limit_s
        self._local.limit_s = limit_s
        try:
            yield
        finally:
            self._local.deadline_s = math.inf

    def tick(self) -> bool:
        """Return True. Raises TemplateLimit after the deadline."""
        if self._clock() > self._local.deadline_s:
            raise TemplateLimit(f"it took more than {self._local.limit_s:g} s")
        return True

    def concat(self, parts: Iterable[str]) -> str:
        """All parts as one text; Jinja calls it to build every text."""
        kept, num_chars = [], 0
        for part in parts:
            num_chars += len(part)
            if num_chars > _MAX_CHARS:
                raise TemplateLimit(f"a text is longer than {_MAX_CHARS} characters")
            kept.append(part)
        return "".join(kept)

    def concat_values(self, *values: Any) -> str:
        """`~` between values of any type."""
        return self.concat(map(str, values))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`. Raises TemplateLimit if the result is too large."""
        if operator == "**":
            _check_power(left, right)
        elif operator == "*":
            _check_product(left, right)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_chars(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **named: Any) -> Any:
        """A call that a template makes, of a macro, a method or a global."""
        self.tick()
        if isinstance(obj, BuiltinMethodType) and isinstance(obj.__self__, str):
            _check_text_method(obj.__self__, obj.__name__, args)
        return super().call(context, obj, *args, **named)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` as the sandbox has it, measured; None for any other value."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def measured(*args: Any, **named: Any) -> str:
            values = [*args, *named.values()]
            values += [item for known in args if isinstance(known, dict) for item in known.values()]
            _check_format(value.__self__, values)
            return formatted(*args, **named)

        return measured

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _MeasuredNodes().visit(template)
        return template.set_environment(self)  # type: ignore[return-value]

    def _ticking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter or test that checks the clock first; Jinja's attributes on it stay."""

        @functools.wraps(function)
        def ticking(*args: Any, **named: Any) -> Any:
            self.tick()
            return function(*args, **named)

        return ticking


def _measured(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that first measures its result."""

    @functools.wraps(function)
    def measured(*args: Any, **named: Any) -> Any:
        values = (*args, *named.values())
        if name in _WIDENING_FILTERS:
            _check_widths(values)
        elif name == "tojson" and any(_is_above(value, _MAX_INDENT) for value in values[1:]):
            raise TemplateLimit(f"it asks tojson for more than {_MAX_INDENT} blanks of indent")
        elif name == "replace":
            texts = [value for value in values if isinstance(value, str)]
            if len(texts) >= 3:
                _check_replacement(texts[0], texts[1], texts[2])
        elif name == "format":
            _check_format(str(values[0]), values[1:])
        elif name == "join":
            args = _checked_join(args, named)
        return function(*args, **named)

    return measured


def _check_chars(num_chars: int) -> None:
    if num_chars > _MAX_CHARS:
        raise TemplateLimit(f"a text is longer than {_MAX_CHARS} characters")


def _check_power(left: Any, right: Any) -> None:
    are_ints = isinstance(left, int) and isinstance(right, int)
    if are_ints and abs(left) > 1 and left.bit_length() * abs(right) > _MAX_BITS:
        raise TemplateLimit("a number is too large")


def _check_product(left: Any, right: Any) -> None:
    for sized, count in ((left, right), (right, left)):
        if isinstance(count, int) and hasattr(sized, "__len__"):
            _check_chars(len(sized) * max(count, 0))
    are_ints = isinstance(left, int) and isinstance(right, int)
    if are_ints and left.bit_length() + right.bit_length() > _MAX_BITS:
        raise TemplateLimit("a number is too large")


def _is_above(value: Any, limit: int) -> bool:
    return isinstance(value, int) and value > limit


def _check_widths(values: Iterable[Any]) -> None:
    if any(_is_above(value, _MAX_WIDTH) for value in values):
        raise TemplateLimit(f"a width or a count is above {_MAX_WIDTH}")


def _check_text_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    if name == "replace" and len(args) >= 2:
        _check_replacement(text, str(args[0]), str(args[1]))
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        _check_chars(sum(map(_size, args[0])) + len(text) * len(args[0]))
    elif name in _WIDENING_METHODS:
        _check_widths(args)


def _check_replacement(text: str, old: str, new: str) -> None:
    if len(new) > len(old):
        _check_chars(len(text) + text.count(old) * len(new))


def _check_format(text: str, values: Iterable[Any]) -> None:
    """Check the widths in the text, or in the values if the text refers to them."""
    takes_widths = "*" in text or "{" in text
    if _WIDE.search(text) or (takes_widths and any(_is_above(v, _MAX_WIDTH) for v in values)):
        raise TemplateLimit(f"it formats a text to a width above {_MAX_WIDTH}")


def _checked_join(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of `join(context, values, separator, attribute)`, its values as a list."""
    context, values, *rest = args
    values = list(values)
    separator = rest[0] if rest else named.get("d", "")
    _check_chars(sum(map(_size, values)) + _size(separator) * len(values))
    return (context, values, *rest)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str) else 1
