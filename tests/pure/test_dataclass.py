"""Our `dataclass` makes what the standard library's makes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import FrozenInstanceError, field, replace

import msgspec
import pytest

from quickstep.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """A frozen value."""

    x: int
    tags: list[str] = field(default_factory=list)
    label: str = "here"


@dataclass(slots=True)
class Counter:
    """A value that changes."""

    count: int = 0

    def __post_init__(self) -> None:
        self.count += 1


@dataclasses.dataclass(frozen=True, slots=True)
class Standard:
    """As `Point`, by the standard decorator."""

    x: int
    tags: list[str] = field(default_factory=list)
    label: str = "here"


def test_values_are_made_shown_and_compared_as_by_the_standard_one() -> None:
    ours, theirs = Point(3, label="a"), Standard(3, label="a")
    assert repr(ours) == repr(theirs).replace("Standard", "Point")
    assert (ours == Point(3, [], "a"), ours == Point(4), ours == theirs) == (True, False, False)
    assert Point(1).tags is not Point(1).tags
    assert list(inspect.signature(Point).parameters) == list(inspect.signature(Standard).parameters)
    assert Point.__match_args__ == Standard.__match_args__
    assert Counter().count == 1


def test_a_frozen_value_refuses_changes_and_hashes_by_its_fields() -> None:
    value = Point(1, label="b")
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'x'"):
        value.x = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'x'"):
        del value.x
    with pytest.raises(TypeError, match="unhashable"):
        hash(Counter())
    with pytest.raises(TypeError, match="unhashable type: 'list'"):
        hash(value)


@pytest.mark.parametrize("value", [Point(2, ["t"], "c"), Counter(5)])
def test_values_are_copied_pickled_and_replaced(value: Point | Counter) -> None:
    assert copy.deepcopy(value) == value
    assert pickle.loads(pickle.dumps(value)) == value
    assert dataclasses.asdict(value) == {
        one.name: getattr(value, one.name) for one in dataclasses.fields(value)
    }
    assert replace(Point(2), x=7) == Point(7)


def test_msgspec_reads_and_writes_them() -> None:
    written = msgspec.json.encode(Point(2, ["t"]))
    assert written == b'{"x":2,"tags":["t"],"label":"here"}'
    assert msgspec.json.decode(written, type=Point) == Point(2, ["t"])


def test_a_wrong_argument_is_named() -> None:
    with pytest.raises(TypeError, match=r"Point.__init__\(\) .*'x'"):
        Point()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        Point(1, y=2)  # type: ignore[call-arg]
