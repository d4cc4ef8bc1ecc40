"""Token ids of clients are those of the model, wherever in the list one is not."""

from __future__ import annotations

import pytest

from quickstep.errors import RequestError
from quickstep.server.generate.sampling import token_ids_of


@pytest.mark.parametrize("ids", [[], [0], [99], list(range(100)), [0, 99] * 1000])
def test_ids_of_the_model_are_kept(ids: list[int]) -> None:
    assert token_ids_of("prompt", ids, 100) == tuple(ids)


@pytest.mark.parametrize("wrong", [-1, 100, 2**31, 2**32 - 1, 2**32, -(2**63), 2**70])
@pytest.mark.parametrize("place", [0, 500, 1000])
def test_another_id_is_named(wrong: int, place: int) -> None:
    ids = [5] * 1000
    ids.insert(place, wrong)
    with pytest.raises(RequestError, match=rf"^prompt holds token id {wrong}, the model has ids"):
        token_ids_of("prompt", ids, 100)
