"""The rule by which clients share a capacity, whatever it counts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quickstep.core.shares import NoRoom, Shares

CAPACITIES = st.integers(1, 2000)
WEIGHTS = st.sampled_from([0.25, 1.0, 3.0, 1000.0])
OWNERS = st.sampled_from(["", "ann", "bob", "eve"])


def num_taken(shares: Shares, owner: str, amount: int = 1, weight: float = 1.0) -> int:
    """How often an owner takes an amount until it is refused."""
    count = 0
    while True:
        try:
            shares.take(owner, amount, weight)
        except NoRoom:
            return count
        count += 1


@given(CAPACITIES, st.lists(st.tuples(OWNERS, st.integers(0, 300), WEIGHTS, st.booleans())))
def test_what_is_taken_never_exceeds_the_capacity_and_is_counted(
    capacity: int, turns: list[tuple[str, int, float, bool]]
) -> None:
    shares, expected = Shares(capacity), Counter[str]()
    for owner, amount, weight, gives_back in turns:
        if gives_back:
            amount = min(amount, expected[owner])
            shares.give_back(owner, amount)
            expected[owner] -= amount
        else:
            try:
                shares.take(owner, amount, weight)
            except NoRoom as refusal:
                assert refusal.capacity == capacity
            else:
                expected[owner] += amount
        assert shares.num_held == expected.total() <= capacity
        assert all(shares.held(name) == count for name, count in expected.items())


@given(CAPACITIES, st.floats(1.0, 1000.0))
def test_an_owner_alone_takes_all_but_the_last_ninth(capacity: int, weight: float) -> None:
    shares = Shares(capacity)
    taken = num_taken(shares, "ann", weight=weight)
    assert capacity - taken <= max(1, round(capacity / 9))
    assert taken >= 1


@given(st.integers(2, 2000), st.dictionaries(st.sampled_from("abcdefgh"), WEIGHTS, min_size=1))
def test_owners_with_nothing_find_room_while_others_flood(
    capacity: int, floods: dict[str, float]
) -> None:
    shares = Shares(capacity)
    for _ in range(3):
        for owner, weight in list(floods.items())[: max(1, capacity // 18)]:
            num_taken(shares, owner, weight=weight)
    for number in range(max(1, capacity // 18)):
        shares.take(f"quiet{number}")


@given(st.integers(90, 2000), st.integers(1, 20))
def test_who_gives_back_to_a_flood_gets_its_part(capacity: int, weight: int) -> None:
    """Two that want as much as they can get, and give back in turns, end up by their weights."""
    shares = Shares(capacity)
    num_taken(shares, "ann")
    for _ in range(4 * capacity):
        for owner in ("ann", "bob"):
            if shares.held(owner):
                shares.give_back(owner)
        for owner, its_weight in (("bob", weight), ("ann", 1)):
            num_taken(shares, owner, weight=its_weight)
    assert shares.held("bob") >= shares.held("ann") or weight == 1
    assert shares.held("bob") >= capacity // 4


def test_everybody_is_limited_by_the_capacity_only() -> None:
    shares = Shares(10)
    assert num_taken(shares, "") == 10
    with pytest.raises(NoRoom, match="all hold 10 of 10"):
        shares.take("ann")


def test_a_refusal_names_whose_share_is_used_up() -> None:
    shares = Shares(9)
    assert num_taken(shares, "ann") == 8
    with pytest.raises(NoRoom, match="ann holds 8 of 9"):
        shares.take("ann")
    shares.take("bob")
    assert shares.largest == "ann"


def test_what_is_there_already_counts_beyond_the_capacity() -> None:
    shares = Shares(4)
    shares.hold("ann", 6)
    for owner in ("ann", "bob"):
        assert not num_taken(shares, owner)
    shares.give_back("ann", 6)
    assert (shares.num_held, shares.largest) == (0, "")
    assert num_taken(shares, "bob") == 3


def test_without_a_capacity_everything_fits() -> None:
    shares = Shares(None)
    shares.take("ann", 10**12)
    shares.take("ann", 10**12)
    assert shares.held("ann") == 2 * 10**12
