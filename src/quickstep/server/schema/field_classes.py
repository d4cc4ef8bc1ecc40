"""The class of a request's field, declared at the field of its schema.

    effort: str | None                              semantic: honoured, or a bad value is 400
    store: Annotated[Any, hint("why")]              hint: accepted; reported where it has no effect
    audio: Annotated[Any, refused("why")]           refused: 400 unless the value asks for nothing

`FieldReader` applies the classes to a request, the reference page and `/openapi.json` print them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

import msgspec
from msgspec import inspect

__all__ = [
    "Effects",
    "FieldClass",
    "Finding",
    "Hint",
    "Honoured",
    "Note",
    "Refusal",
    "Row",
    "field_classes",
    "findings",
    "hint",
    "refused",
]

_KEY = "field_class"


class Hint(msgspec.Struct, frozen=True):
    """A field that may have no effect.

    Attributes:
        why: Why it has none.
        passes: Values, null in addition, that ask for nothing and are not reported.
        conditional: It has an effect on some models: the API that reads it reports it on others.
    """

    why: str
    passes: tuple[object, ...] = ()
    conditional: bool = False


class Refusal(msgspec.Struct, frozen=True):
    """A field that changes the answer in a way that this server lacks.

    Attributes:
        why: Why it is refused.
        passes: Values, null in addition, that ask for nothing and are accepted.
    """

    why: str
    passes: tuple[object, ...] = ()


class Honoured(msgspec.Struct, frozen=True):
    """The visible effect, as a sentence; `otherwise` if it is a hint that some models lack."""

    effect: str
    otherwise: Hint | None = None


class Note(msgspec.Struct, frozen=True):
    """A note without effect: checked for its type, accepted, and why it changes nothing."""

    why: str


FieldClass = Hint | Refusal
Row = Honoured | Note | Hint | Refusal
# What a field does: a sentence for its effect.
Effects = Mapping[str, str | Note]


class Finding(msgspec.Struct, frozen=True):
    """A field of a request that asks for what the server does not do; `path` is in the body."""

    path: str
    declared: FieldClass


def hint(why: str, *, passes: tuple[object, ...] = (), conditional: bool = False) -> msgspec.Meta:
    """The annotation of a field that may have no effect."""
    return msgspec.Meta(extra={_KEY: Hint(why, passes, conditional)})


def refused(why: str, *, passes: tuple[object, ...] = ()) -> msgspec.Meta:
    """The annotation of a field that is refused by name."""
    return msgspec.Meta(extra={_KEY: Refusal(why, passes)})


def asks_for_nothing(declared: FieldClass, value: object) -> bool:
    """Whether `value` passes without a word. Types count: 1 is not true."""
    if value is None:
        return True
    return any(type(value) is type(passing) and value == passing for passing in declared.passes)


@cache
def field_classes(struct: type[msgspec.Struct]) -> Mapping[str, FieldClass]:
    """The hints and refusals of a schema's own and inherited fields."""
    declared = {
        field.encode_name: (field.type.extra or {}).get(_KEY)
        for field in _fields(struct)
        if isinstance(field.type, inspect.Metadata)
    }
    return {name: known for name, known in declared.items() if known is not None}


def findings(value: object, path: str = "") -> Iterator[Finding]:
    """What a decoded request asks for that the server does not do, in the order of its fields.

    `path` leads to `value` in the body. Conditional hints are left to the API that reads them.
    """
    if not _asks(value):  # most requests: no path needs to be written
        return
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from findings(item, f"{path}[{index}]")
    elif isinstance(value, msgspec.Struct):
        prefix = f"{path}." if path else ""
        classes, walked = _checked_fields(type(value))
        for name, declared in classes:
            if not asks_for_nothing(declared, getattr(value, name)):
                yield Finding(f"{prefix}{name}", declared)
        for name in walked:
            yield from findings(getattr(value, name), f"{prefix}{name}")


def _asks(value: object) -> bool:
    """Whether there is anything to find."""
    if isinstance(value, list):
        return any(map(_asks, value))
    if not isinstance(value, msgspec.Struct):
        return False
    classes, walked = _checked_fields(type(value))
    for name, declared in classes:
        given = getattr(value, name)
        if given is not None and not asks_for_nothing(declared, given):
            return True
    return any(_asks(getattr(value, name)) for name in walked)


@cache
def _checked_fields(
    struct: type[msgspec.Struct],
) -> tuple[tuple[tuple[str, FieldClass], ...], tuple[str, ...]]:
    """The hints and refusals that are judged by their value, and the fields that may hold more."""
    classes = tuple(
        (name, declared)
        for name, declared in field_classes(struct).items()
        if not (isinstance(declared, Hint) and declared.conditional)
    )
    walked = tuple(field.name for field in _fields(struct) if _holds_classes(field.type))
    return classes, walked


def _holds_classes(declared: inspect.Type) -> bool:
    return any(any(_checked_fields(struct.cls)) for struct in structs_of(declared))


def structs_of(declared: inspect.Type) -> Iterator[inspect.StructType]:
    """The structs that a field of this type may hold, in lists as well."""
    match declared:
        case inspect.StructType():
            yield declared
        case inspect.Metadata(type=inner) | inspect.ListType(item_type=inner):
            yield from structs_of(inner)
        case inspect.UnionType(types=members):
            for member in members:
                yield from structs_of(member)
        case _:
            return


def _fields(struct: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    described = inspect.type_info(struct)
    assert isinstance(described, inspect.StructType), "only structs have fields"
    return described.fields
