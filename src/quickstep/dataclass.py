"""`dataclass` as in the standard library, made for an import in the tenth of its time.

The standard decorator writes and compiles the source of up to six methods per class: 0.9 ms for a
frozen one. A process of ours imports over a hundred of them, and before its first token it makes
values of a fraction. Here `__init__` is compiled when it is first looked at; the other methods
read the fields through one `attrgetter`, which is as fast as the compiled ones. Everything else
(fields, slots, `__match_args__`) is the standard library's doing, so that `replace`, `fields`,
pickle and msgspec find what they look for.

What is used nowhere here is not offered: order, keyword-only fields, fields without `init`,
inheritance. To a type checker this is the standard decorator.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from operator import attrgetter
from reprlib import recursive_repr
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(*, frozen=False, slots=False, eq=True, unsafe_hash=False):
        """The decorator; see `dataclasses.dataclass`."""

        def made(cls):
            bare = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(cls)
            methods = {"__init__": _PendingInit(bare, frozen), "__repr__": _repr_of(bare)}
            if eq:
                methods |= _comparing(bare, hashed=frozen or unsafe_hash)
            if frozen:
                methods |= {"__setattr__": _refuse_set, "__delattr__": _refuse_delete}
                if slots:  # the way around the two above
                    methods |= {"__getstate__": _state_of, "__setstate__": _take_state}
            for name, method in methods.items():
                if name not in cls.__dict__:
                    setattr(bare, name, method)
            return bare

        return made


__all__ = ["dataclass"]

_set_field = object.__setattr__
_UNGIVEN = object()


class _PendingInit:
    """Stands for `__init__` until somebody looks at it, and then puts the compiled one there."""

    __slots__ = ("_cls", "_is_frozen")

    def __init__(self, cls: type[Any], is_frozen: bool) -> None:
        self._cls = cls
        self._is_frozen = is_frozen

    def __get__(self, value: object | None, owner: type[Any]) -> Callable[..., None]:
        cls = self._cls
        if cls.__dict__["__init__"] is self:  # else another thread was faster
            cls.__init__ = _compiled_init(cls, self._is_frozen)
        init: Callable[..., None] = cls.__dict__["__init__"]
        return init if value is None else MethodType(init, value)


def _compiled_init(cls: type[Any], is_frozen: bool) -> Callable[..., None]:
    names: dict[str, Any] = {"_set_field": _set_field, "_UNGIVEN": _UNGIVEN}
    arguments, lines = ["self"], []
    for field in dataclasses.fields(cls):
        name = value = field.name
        default, factory = f"_default_{name}", f"_factory_{name}"
        if field.default is not dataclasses.MISSING:
            names[default] = field.default
            arguments.append(f"{name}={default}")
        elif field.default_factory is not dataclasses.MISSING:
            names[factory] = field.default_factory
            arguments.append(f"{name}=_UNGIVEN")
            value = f"{factory}() if {name} is _UNGIVEN else {name}"
        else:
            arguments.append(name)
        set_it = f"_set_field(self, {name!r}, {value})" if is_frozen else f"self.{name} = {value}"
        lines.append(set_it)
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    body = "\n  ".join(lines) or "pass"
    source = (
        f"def made({', '.join(names)}):\n"
        f" def __init__({', '.join(arguments)}):\n  {body}\n"
        " return __init__"
    )
    made: dict[str, Any] = {}
    exec(source, vars(sys.modules[cls.__module__]), made)
    init: Callable[..., None] = made["made"](**names)
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {field.name: field.type for field in dataclasses.fields(cls)}
    init.__annotations__["return"] = None
    return init


def _comparing(cls: type[Any], hashed: bool) -> dict[str, Any]:
    """`__eq__` and `__hash__` over the fields; a value that may change has no hash."""
    values = _values_of(tuple(field.name for field in dataclasses.fields(cls) if field.compare))

    def __eq__(self: object, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return values(self) == values(other)

    def __hash__(self: object) -> int:
        return hash(values(self))

    return {"__eq__": __eq__, "__hash__": __hash__ if hashed else None}


def _values_of(names: tuple[str, ...]) -> Callable[[object], tuple[Any, ...]]:
    if not names:
        return lambda value: ()
    if len(names) == 1:
        one = attrgetter(*names)
        return lambda value: (one(value),)
    return attrgetter(*names)


def _repr_of(cls: type[Any]) -> Callable[[object], str]:
    names = tuple(field.name for field in dataclasses.fields(cls) if field.repr)

    @recursive_repr()
    def __repr__(self: object) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{self.__class__.__qualname__}({shown})"

    return __repr__


def _refuse_set(self: object, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_delete(self: object, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state_of(self: Any) -> list[object]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _take_state(self: Any, state: list[object]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        _set_field(self, field.name, value)
