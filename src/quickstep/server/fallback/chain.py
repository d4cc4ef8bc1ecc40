"""The fallback chain of one request, and what a server keeps for all of them.

    FallbackState.chain_of -> Chain;  run_chain: attempt -> refused or failed -> decide -> attempt

An attempt is a request like any other: it passes the limits of its key, the queue and the engine's
predictions. An attempt that sent a byte is the last one.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, MutableMapping

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quickstep.core.explanation import FallbackAttempt
from quickstep.core.fallback import (
    ANY_MODEL,
    Cause,
    ChainProgress,
    FallbackStep,
    OtherModel,
    Refuse,
    Route,
    Upstream,
    cause_of,
)
from quickstep.environment import OF_LIBRARIES
from quickstep.errors import ConfigError, EngineError, RequestError
from quickstep.server.upstream.client import TimeLeft, UpstreamClient
from quickstep.server.usage.recorder import UpstreamAnswer
from quickstep.types import Request

UPSTREAM_PATHS = {
    "/v1/chat/completions": "/chat/completions",
    "/chat/completions": "/chat/completions",
    "/v1/completions": "/completions",
    "/completions": "/completions",
}
_MAX_NOTED = 4096  # requests whose steps are kept
_MAX_ATTEMPTS = 16
_MAX_ERROR = 300  # characters
_LOG = logging.getLogger("quickstep.server")


class _ChainFields(msgspec.Struct, frozen=True):
    """The fields of a body that a chain reads before the body is parsed."""

    model: str | None = None
    fallback: str | None = None
    stream: bool | None = None
    timeout_s: float | None = None
    ttft_deadline_ms: float | None = None


_FIELDS = msgspec.json.Decoder(_ChainFields)


class Fallback(msgspec.Struct, frozen=True):
    """What metrics count: a step of a route that was tried."""

    route: str
    step: str
    cause: str


class FallbackState:
    """The routes of a server, its upstreams, and how often each step was tried.

    Args:
        environ: Has the API keys of upstreams, which are removed: child processes do not need them.
        clock: Seconds that only grow, as `received_s` of requests.

    Raises:
        ConfigError: A key is missing.
    """

    def __init__(
        self,
        routes: Mapping[str, Route],
        environ: MutableMapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.routes = routes
        self.clock = clock
        self.counts: Counter[Fallback] = Counter()
        self._attempts: OrderedDict[str, list[FallbackAttempt]] = OrderedDict()  # by request
        self.report_answer: Callable[[UpstreamAnswer], None] = _ignore
        self.upstreams = {
            step: UpstreamClient(step, _key_of(step, route.name, environ), clock)
            for route in routes.values()
            for step in route.steps
            if isinstance(step, Upstream)
        }
        for step in self.upstreams:  # as `take_api_keys` does
            if step.key_env not in OF_LIBRARIES:
                environ.pop(step.key_env, None)

    def follow_answers(self, report: Callable[[UpstreamAnswer], None]) -> None:
        """Call `report` with each answer of an upstream that has ended."""
        self.report_answer = report

    def note_attempt(self, request_id: str, attempt: FallbackAttempt) -> None:
        """A request has entered a step. The latest requests are kept; clients choose ids, so that
        an entry may be of several requests.
        """
        attempts = self._attempts.setdefault(request_id, [])
        self._attempts.move_to_end(request_id)
        attempts.append(attempt)
        del attempts[:-_MAX_ATTEMPTS]
        if len(self._attempts) > _MAX_NOTED:
            self._attempts.popitem(last=False)

    def attempts_of(self, request_id: str) -> tuple[FallbackAttempt, ...]:
        """The steps that a request with this id has entered, as far as they are kept."""
        return tuple(self._attempts.get(request_id, ()))

    def chain_of(
        self,
        body: bytes,
        default_model: str,
        received_s: float,
        path: str,
        request_id: str = "",
    ) -> Chain | None:
        """The chain of a request; None if no route is for its model, or the client wants none."""
        if not self.routes:
            return None
        try:
            fields = _FIELDS.decode(body)
        except (msgspec.DecodeError, RecursionError):
            return None  # the parser says what is wrong with it
        model = fields.model or default_model
        route = self.routes.get(model) or self.routes.get(ANY_MODEL)
        if route is None or fields.fallback == "none":
            return None
        deadline_ms = fields.ttft_deadline_ms
        return Chain(
            self,
            route,
            model=model,
            path=UPSTREAM_PATHS.get(path),
            request_id=request_id,
            keeps_model=fields.fallback == "same_model",
            due_s=(
                None if deadline_ms is None else received_s + deadline_ms / 1e3,
                None if fields.timeout_s is None else received_s + fields.timeout_s,
            ),
        )


def _ignore(_: UpstreamAnswer) -> None:
    return


def _key_of(step: Upstream, route: str, environ: Mapping[str, str]) -> str | None:
    if not step.key_env:
        return None
    key = environ.get(step.key_env, "")
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"routes.{route}: the environment variable {step.key_env} must have the API key of "
            f"{step.url}"
        )
    return key


class Chain:
    """The steps of one request; each is applied to the request as it came. Owned by `run_chain`;
    attempts read it and report to it.

    Attributes:
        upstream: What serves the present attempt instead of an engine.
        is_counted: The rate limit of requests has counted the request.
    """

    def __init__(
        self,
        state: FallbackState,
        route: Route,
        *,
        model: str,
        path: str | None,
        request_id: str,
        keeps_model: bool,
        due_s: tuple[float | None, float | None],
    ) -> None:
        self.upstream: UpstreamClient | None = None
        self.is_counted = False
        self.path = path
        self._request_id = request_id
        self._state = state
        self._route = route
        self._due_s = due_s
        self._progress = ChainProgress(route, model, keeps_model, is_openai=path is not None)

    @property
    def step(self) -> FallbackStep | None:
        """What the present attempt changes of the request as it came; None for nothing."""
        return self._progress.step

    @property
    def model(self) -> str:
        """The model of the present attempt, by name."""
        return self._progress.model

    @property
    def leaves_model(self) -> bool:
        """Whether another model serves the present attempt than the one that the client named."""
        return isinstance(self.step, OtherModel)

    @property
    def time_left(self) -> TimeLeft:
        """Until the deadlines of the first token and of the end."""
        now_s = self._state.clock()
        first_s, total_s = (None if due is None else due - now_s for due in self._due_s)
        return TimeLeft(first_s, total_s)

    def applied(self, request: Request) -> Request:
        """The request of the present attempt."""
        return self._progress.applied(request)

    def after(self, error: Exception) -> bool:
        """Enter the step to try after an error; False to answer with it. Raises RequestError for
        a refusal that the route has chosen.
        """
        cause = cause_of(error)
        if cause is None:
            return False
        clients = self._state.upstreams.items()
        busy = frozenset([step.url for step, client in clients if not client.is_free])
        first_byte_s = {step.url: client.breaker.first_byte_s for step, client in clients}
        step = self._progress.enter(cause, self.time_left.least_s, busy, first_byte_s)
        if step is None:
            return False
        self._note(step, cause, error)
        self.upstream = self._state.upstreams[step] if isinstance(step, Upstream) else None
        if isinstance(step, Refuse):
            raise _refusal(step, error)
        return True

    def _note(self, step: FallbackStep, cause: Cause, error: Exception) -> None:
        self._state.counts[Fallback(self._route.name, str(step), cause.value)] += 1
        attempt = FallbackAttempt(str(step), cause.value, str(error)[:_MAX_ERROR])
        self._state.note_attempt(self._request_id, attempt)
        _LOG.info("route %s: %s after %s: %s", self._route.name, step, cause.value, error)


def _refusal(step: Refuse, error: Exception) -> RequestError:
    """The error with the step's status, and when the request may succeed."""
    return RequestError(
        str(error),
        param=error.param if isinstance(error, RequestError) else None,
        status=step.status,
        code=(error.code if isinstance(error, RequestError) else None) or "fallback_exhausted",
        retry_after_s=getattr(error, "retry_after_s", None),
    )


async def run_chain(
    chain: Chain, request: HttpRequest, attempt: Callable[[], Awaitable[Response]]
) -> Response:
    """The response of the first attempt that is not refused and does not fail. `attempt` raises
    before it has sent anything, and reads from `chain` what to do. Raises the last error.
    """
    while True:
        try:
            return await attempt()
        except (RequestError, EngineError) as error:
            if not chain.after(error):
                raise
        finally:
            if chain.step is not None:
                request.scope["state"]["fallback"] = str(chain.step)
