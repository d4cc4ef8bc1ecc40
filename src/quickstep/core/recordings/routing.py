"""A recording of a router's decisions: `RecordingRouter` writes it, `replay_routing` repeats it.

JSON lines of three kinds, in the order in which things happened:

    router        once, first: which router, and for how many replicas
    choice        a request, what the replicas had reported, and the replica that got it
    lost_cache    a replica has started again

A request is the digests of its blocks and its length: no text and no token. Of the replicas, a line
has those whose state is another than in the line before. The simulator's routers are the live
ones, so the same lines have to give the same choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from quickstep.core.admission import AdmissionState
from quickstep.core.cost_model import Coefficients, LinearCostModel
from quickstep.core.router import ROUTERS, ReplicaState, ReplicaView, Router, RouteRequest
from quickstep.errors import ConfigError
from quickstep.json_line import json_line

_VERSION = 1


class RouterLine(msgspec.Struct, frozen=True, tag_field="kind", tag="router"):
    """The router that decides; one of `core.router.ROUTERS`."""

    version: int
    router: str
    num_replicas: int


class RecordedView(msgspec.Struct, frozen=True):
    """`ReplicaView` as plain data: `coefficients` are those of its cost model."""

    state: ReplicaState
    num_live: int
    admission: AdmissionState
    reported_at_s: float | None
    num_sent: int
    num_blocks: int | None
    coefficients: Coefficients | None
    adapters: tuple[str, ...]
    adapter_load_s: float

    @staticmethod
    def of(view: ReplicaView) -> RecordedView:
        """The view of a live replica, whose costs are linear."""
        costs = view.costs
        assert costs is None or isinstance(costs, LinearCostModel), "live engines report no other"
        return RecordedView(
            view.state,
            view.num_live,
            view.admission,
            view.reported_at_s,
            view.num_sent,
            view.num_blocks,
            None if costs is None else costs.coefficients,
            tuple(sorted(view.adapters)),
            view.adapter_load_s,
        )

    @property
    def view(self) -> ReplicaView:
        """What the router was given."""
        return ReplicaView(
            state=self.state,
            num_live=self.num_live,
            admission=self.admission,
            reported_at_s=self.reported_at_s,
            num_sent=self.num_sent,
            num_blocks=self.num_blocks,
            costs=None if self.coefficients is None else LinearCostModel(self.coefficients),
            adapters=frozenset(self.adapters),
            adapter_load_s=self.adapter_load_s,
        )


class ChoiceLine(msgspec.Struct, frozen=True, tag_field="kind", tag="choice"):
    """A decision. `views` are those that have changed, by the number of the replica."""

    now_s: float
    request: RouteRequest
    views: dict[int, RecordedView]
    chosen: int


class LostCacheLine(msgspec.Struct, frozen=True, tag_field="kind", tag="lost_cache"):
    """`Router.lost_cache`."""

    replica: int


RoutingLine = RouterLine | ChoiceLine | LostCacheLine


class RecordingRouter:
    """A router whose calls and choices are written, one line at a time."""

    def __init__(
        self, name: str, router: Router, num_replicas: int, write: Callable[[bytes], None]
    ) -> None:
        self._router = router
        self._write = write
        self._views: list[RecordedView | None] = [None] * num_replicas
        self._put(RouterLine(_VERSION, name, num_replicas))

    @property
    def predicts(self) -> bool:
        """`Router.predicts`."""
        return self._router.predicts

    @property
    def reads_prompts(self) -> bool:
        """`Router.reads_prompts`."""
        return self._router.reads_prompts

    def choose(self, request: RouteRequest, replicas: Sequence[ReplicaView], now: float) -> int:
        """`Router.choose`."""
        chosen = self._router.choose(request, replicas, now)
        views = dict(enumerate(map(RecordedView.of, replicas)))
        changed = {place: view for place, view in views.items() if view != self._views[place]}
        self._views = list(views.values())
        self._put(ChoiceLine(now, request, changed, chosen))
        return chosen

    def num_cached_tokens(self, request: RouteRequest, num_replicas: int) -> list[int]:
        """`Router.num_cached_tokens`, which changes nothing."""
        return self._router.num_cached_tokens(request, num_replicas)

    def lost_cache(self, replica: int) -> None:
        """`Router.lost_cache`."""
        self._router.lost_cache(replica)
        self._put(LostCacheLine(replica))

    def _put(self, line: RoutingLine) -> None:
        self._write(json_line(line) + b"\n")


class ReplayedRouting(msgspec.Struct, frozen=True):
    """What a replay has compared; `different_line` is the first with another choice."""

    router: str
    num_replicas: int
    num_choices: int
    different_line: int | None = None


def is_routing(line: bytes) -> bool:
    """Whether a file that begins with this line records a router."""
    try:
        return isinstance(_DECODER.decode(line), RouterLine)
    except (msgspec.DecodeError, ValueError):
        return False


def replay_routing(lines: Iterable[bytes]) -> ReplayedRouting:
    """Give a new router the recorded calls, and compare its choices. A last line without its end is
    left out: the server was killed.

    Raises:
        ConfigError: A line is not valid; it has the line's number.
    """
    begun: RouterLine | None = None
    router: Router | None = None
    views: list[ReplicaView] = []
    num_choices = 0
    for number, text in enumerate(lines, 1):
        if not text.endswith(b"\n"):
            break
        line = _decoded(text, number)
        if isinstance(line, RouterLine) == (begun is not None):
            what = "a second router" if begun else "no router before it"
            raise ConfigError(f"line {number} of the recording is not valid: {what}")
        match line:
            case RouterLine():
                begun, router = line, ROUTERS[line.router]()
                views = [ReplicaView()] * line.num_replicas
            case ChoiceLine():
                assert begun is not None and router is not None, "the first line was a router's"
                if not set(line.views) <= set(range(len(views))):
                    raise ConfigError(f"line {number} of the recording has unknown replicas")
                for place, view in line.views.items():
                    views[place] = view.view
                num_choices += 1
                if router.choose(line.request, views, line.now_s) != line.chosen:
                    return ReplayedRouting(begun.router, len(views), num_choices, number)
            case LostCacheLine(replica=replica):
                assert router is not None, "the first line was a router's"
                router.lost_cache(replica)
    if begun is None:
        raise ConfigError("the recording has no line")
    return ReplayedRouting(begun.router, len(views), num_choices)


def _decoded(text: bytes, number: int) -> RoutingLine:
    try:
        line: RoutingLine = _DECODER.decode(text)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"line {number} of the recording is not valid: {error}") from None
    if isinstance(line, RouterLine) and (line.version != _VERSION or line.router not in ROUTERS):
        raise ConfigError(
            f"line {number} of the recording is of version {line.version} and of the router "
            f"{line.router[:100]!r}, which this Quickstep cannot repeat"
        )
    return line


_DECODER: msgspec.json.Decoder[RoutingLine] = msgspec.json.Decoder(RoutingLine)
