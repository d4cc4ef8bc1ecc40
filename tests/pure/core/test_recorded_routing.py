"""A router's recorded decisions: written as plain data, repeated, and what is refused."""

from __future__ import annotations

from random import Random

import pytest

from quickstep.core.admission import AdmissionState
from quickstep.core.cost_model import Coefficients, LinearCostModel
from quickstep.core.recordings.routing import RecordingRouter, is_routing, replay_routing
from quickstep.core.router import ROUTERS, ReplicaState, ReplicaView, Router, RouteRequest
from quickstep.errors import ConfigError


def recorded(name: str, router: Router, seed: int = 0) -> list[bytes]:
    """The lines of a hundred decisions among four replicas, which restart now and then."""
    rng, lines = Random(seed), list[bytes]()
    recording = RecordingRouter(name, router, 4, lines.append)
    for number in range(100):
        views = [
            ReplicaView(
                state=ReplicaState.DOWN if rng.random() < 0.2 and place else ReplicaState.UP,
                num_live=rng.randrange(4),
                admission=AdmissionState(num_waiting=rng.randrange(3), prompt_s=rng.random() / 7),
                reported_at_s=number / 3,
                costs=LinearCostModel(Coefficients(step_s=rng.random(), token_s=rng.random() / 99)),
                adapters=frozenset({"b", "a"}),
                adapter_load_s=0.1,
            )
            for place in range(4)
        ]
        digests = tuple(bytes([rng.randrange(5), place]) for place in range(rng.randrange(6)))
        request = RouteRequest(
            num_prompt_tokens=16 * len(digests) + 3,
            digests=digests,
            level=rng.randrange(-2, 3),
            adapter_id=rng.choice(["", "a", "c"]),
        )
        assert views[recording.choose(request, views, number / 3)].is_up
        if rng.random() < 0.1:
            recording.lost_cache(rng.randrange(4))
    return lines


@pytest.mark.parametrize("name", ROUTERS)
def test_the_same_calls_give_the_same_choices(name: str) -> None:
    lines = recorded(name, ROUTERS[name]())
    assert is_routing(lines[0])
    replayed = replay_routing(lines)
    assert (replayed.router, replayed.num_replicas) == (name, 4)
    assert (replayed.num_choices, replayed.different_line) == (100, None)


def test_another_choice_is_found() -> None:
    lines = recorded("round-robin", ROUTERS["predicted"]())
    replayed = replay_routing(lines)
    assert replayed.different_line is not None
    assert replayed.num_choices < 100


def test_a_line_that_was_cut_off_is_left_out() -> None:
    lines = recorded("predicted", ROUTERS["predicted"]())
    replayed = replay_routing([*lines[:50], lines[50][:-1]])
    assert replayed.different_line is None
    assert 30 < replayed.num_choices < 50


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no line"),
        ([b'{"kind":"lost_cache","replica":0}\n'], "line 1 .* no router before it"),
        ([b'{"kind":"router","version":9,"router":"prefix","num_replicas":2}\n'], "version 9"),
        ([b'{"kind":"router","version":1,"router":"dice","num_replicas":2}\n'], "'dice'"),
        ([b'{"kind":"router","version":1,"router":"prefix","num_replicas":2}\n'] * 2, "second"),
        ([b"{}\n"], "line 1 of the recording is not valid"),
    ],
)
def test_what_is_no_recording_is_refused(lines: list[bytes], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replay_routing(lines)
    assert not is_routing(b"{}\n")
