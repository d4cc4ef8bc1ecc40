"""Items that wait are served one owner after the other, the one served least first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quickstep.core.owner_turns import OwnerTurns


def served(turns: OwnerTurns[str], number: int) -> str:
    return "".join([turns.pop()[1] for _ in range(number)])


def with_items(turns: OwnerTurns[str], items: str) -> None:
    for item in items:
        turns.push(item, item)


def test_an_owner_that_comes_anew_is_before_many_items_of_another() -> None:
    turns = OwnerTurns[str]()
    turns.serve("a")
    with_items(turns, "aaa")
    with_items(turns, "b")
    assert served(turns, 1) == "b"
    with_items(turns, "b")
    assert served(turns, 4) == "abaa"


def test_what_was_not_used_is_no_credit() -> None:
    turns = OwnerTurns[str]()
    for _ in range(100):
        turns.serve("a")
    with_items(turns, "bbbbaaa")
    assert served(turns, 7) == "bababab"


def test_an_item_that_costs_more_takes_more_turns() -> None:
    turns = OwnerTurns[str]()
    for _ in range(3):
        turns.push("a", "a", 3.0)
    with_items(turns, "b" * 9)
    assert served(turns, 12) == "abbbabbbabbb"


def test_dropped_items_take_no_turn() -> None:
    turns = OwnerTurns[str]()
    with_items(turns, "ab")
    assert turns.drop("a", turns.waiting_of("a")[0])
    assert not turns.drop("a", "a")
    with_items(turns, "c")
    assert served(turns, 2) == "bc"
    assert not turns


OWNERS = "abc"


@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "drop"]), st.sampled_from(OWNERS))))
def test_nothing_is_lost_and_backlogged_owners_are_served_alike(
    events: list[tuple[str, str]],
) -> None:
    """Between two owners that wait all the time, the numbers of turns differ by one at most."""
    turns = OwnerTurns[object]()
    waiting: dict[str, list[object]] = {owner: [] for owner in OWNERS}
    counts: dict[tuple[str, str], int] = {}  # how often more than the other, while both wait
    for event, owner in events:
        if event == "push":
            waiting[owner].append(item := object())
            turns.push(owner, item)
        elif event == "drop" and waiting[owner]:
            assert turns.drop(owner, waiting[owner].pop())
        elif event == "pop" and turns:
            popped, item = turns.pop()
            assert waiting[popped].pop(0) is item
            for other in OWNERS:
                counts[popped, other] = counts.get((popped, other), 0) + 1
                counts[other, popped] = counts.get((other, popped), 0) - 1
        assert bool(turns) == any(waiting.values())
        for pair in counts:
            if not all(waiting[one] for one in pair):
                counts[pair] = 0
            assert abs(counts[pair]) <= 1
        for each, items in waiting.items():
            assert turns.waiting_of(each) == tuple(items)
