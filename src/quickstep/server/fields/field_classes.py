"""What a request's field does, declared once at the field of its schema.

    seed: Annotated[int | None, effect("...")]      honoured: its effect; a bad value is 400
    name: Annotated[str, note("why")]               note: accepted, changes nothing
    store: Annotated[Any, hint("why")]              hint: accepted; reported where it has no effect
    audio: Annotated[Any, refused("why")]           refused: 400, unless the value requests nothing

`effect` together with a conditional `hint` is a field that only some models honour. A schema may
also have a class variable `refused_form`: the reason why this form of a message, a part or a tool
is refused. `FieldReader` applies the declarations to a request; `/openapi.json`, `/docs` and
`docs/reference/api.md` print them (`field_reference`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

_CLASS = "field_class"
_EFFECT = "effect"


class Hint(msgspec.Struct, frozen=True):
    """A field that may have no effect.

    Attributes:
        why: Why it has none.
        passes: Values, in addition to null, that request nothing and are not reported.
        conditional: It has an effect on some models: the API that reads it reports it on others.
    """

    why: str
    passes: tuple[object, ...] = ()
    conditional: bool = False


class RefusedField(msgspec.Struct, frozen=True):
    """A field that changes the answer in a way that this server lacks.

    Attributes:
        why: Why it is refused.
        passes: Values, in addition to null, that request nothing and are accepted.
    """

    why: str
    passes: tuple[object, ...] = ()


class Honoured(msgspec.Struct, frozen=True):
    """The visible effect, as a sentence; `otherwise` if it is a hint that some models lack."""

    effect: str
    otherwise: Hint | None = None


class Note(msgspec.Struct, frozen=True):
    """A field without effect: its type is checked, and `why` says why it changes nothing."""

    why: str


FieldClass = Hint | RefusedField
Row = Honoured | Note | Hint | RefusedField


class Finding(msgspec.Struct, frozen=True):
    """A field of a request for something that the server does not do; `path` is in the body."""

    path: str
    declared: FieldClass


def effect(sentence: str) -> msgspec.Meta:
    """The annotation of a field that is honoured: its effect, as a sentence for users."""
    return msgspec.Meta(extra={_EFFECT: sentence})


def note(why: str) -> msgspec.Meta:
    """The annotation of a field that is accepted and changes nothing."""
    return msgspec.Meta(extra={_EFFECT: Note(why)})


def hint(why: str, *, passes: tuple[object, ...] = (), conditional: bool = False) -> msgspec.Meta:
    """The annotation of a field that may have no effect."""
    return msgspec.Meta(extra={_CLASS: Hint(why, passes, conditional)})


def refused(why: str, *, passes: tuple[object, ...] = ()) -> msgspec.Meta:
    """The annotation of a field that is refused by name."""
    return msgspec.Meta(extra={_CLASS: RefusedField(why, passes)})


def requests_nothing(declared: FieldClass, value: object) -> bool:
    """Whether `value` is accepted and not reported. Types count: 1 is not true."""
    if value is None:
        return True
    return any(type(value) is type(passing) and value == passing for passing in declared.passes)


@cache
def field_classes(struct: type[msgspec.Struct]) -> Mapping[str, FieldClass]:
    """The hints and refusals of a schema's own and inherited fields."""
    return {name: extra[_CLASS] for name, extra in _annotations(struct).items() if _CLASS in extra}


def declared_effects(struct: type[msgspec.Struct]) -> Mapping[str, str | Note]:
    """The effects and notes of a schema's own and inherited fields."""
    return {
        name: extra[_EFFECT] for name, extra in _annotations(struct).items() if _EFFECT in extra
    }


def _annotations(struct: type[msgspec.Struct]) -> Mapping[str, Mapping[str, Any]]:
    return {
        field.encode_name: field.type.extra or {}
        for field in _fields(struct)
        if isinstance(field.type, inspect.Metadata)
    }


def findings(value: object, path: str = "") -> Iterator[Finding]:
    """What a decoded request requests that the server does not do, in the order of its fields.

    `path` leads to `value` in the body. Conditional hints are left to the API that reads them.
    """
    if not _has_findings(value):  # most requests: no path has to be built
        return
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from findings(item, f"{path}[{index}]")
    elif isinstance(value, msgspec.Struct):
        prefix = f"{path}." if path else ""
        classes, walked = _checked_fields(type(value))
        for name, declared in classes:
            if not requests_nothing(declared, getattr(value, name)):
                yield Finding(f"{prefix}{name}", declared)
        for name in walked:
            yield from findings(getattr(value, name), f"{prefix}{name}")


def _has_findings(value: object) -> bool:
    if isinstance(value, list):
        return any(map(_has_findings, value))
    if not isinstance(value, msgspec.Struct):
        return False
    classes, walked = _checked_fields(type(value))
    for name, declared in classes:
        given = getattr(value, name)
        if given is not None and not requests_nothing(declared, given):
            return True
    return any(_has_findings(getattr(value, name)) for name in walked)


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


@cache
def _fields(struct: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    described = inspect.type_info(struct)
    assert isinstance(described, inspect.StructType), "only structs have fields"
    return described.fields
