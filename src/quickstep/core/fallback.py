"""Fallback chains: what a server tries, in order, for a request that it cannot serve as it came.

    routes of the config file -> read_routes -> Route;  decide(route, situation) -> Decision

`decide` is pure: the server and the simulator call it when a request was refused or has failed and
no byte of its response is sent. Predictions come in with the `Situation`; each attempt passes the
queue, the limits and the predictions of what it goes to, as any request does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import structs

from quickstep.errors import ConfigError, EngineError, RequestError
from quickstep.types import Request

ANY_MODEL = "*"  # the route of models without one of their own
LEAST_FIRST_BYTE_S = 0.05  # with less time left an upstream is not called
_MAX_STEPS = 16
_REFUSALS = (429, 503)
_LIMIT_CODES = ("rate_limit_exceeded", "insufficient_quota")
_KINDS = ("max_tokens", "speculation", "model", "upstream", "refuse")


class Cause(Enum):
    """Why a request cannot be served as it came."""

    RATE_LIMIT = "rate_limit"
    OVERLOAD = "overload"
    DEADLINE = "deadline"
    MEMORY = "memory"
    FAILURE = "failure"


class ShorterOutput(msgspec.Struct, frozen=True):
    """At most so many tokens of output: a prefix of the longer one."""

    max_tokens: int

    def __str__(self) -> str:
        return f"max_tokens={self.max_tokens}"


class NoSpeculation(msgspec.Struct, frozen=True):
    """No draft tokens, so that their memory and their faults are avoided; the same output."""

    def __str__(self) -> str:
        return "speculation=off"


class OtherModel(msgspec.Struct, frozen=True):
    """Another model of the server, which the response names."""

    name: str

    def __str__(self) -> str:
        return f"model={self.name}"


class Upstream(msgspec.Struct, frozen=True):
    """Another server with OpenAI's API.

    Attributes:
        url: What `/chat/completions` follows, such as `https://api.example.com/v1`.
        model: The model's name there.
        key_env: The environment variable with the API key; "" for none.
    """

    url: str
    model: str
    key_env: str = ""

    def __str__(self) -> str:
        return f"upstream={urlsplit(self.url).hostname}/{self.model}"


class Refuse(msgspec.Struct, frozen=True):
    """An error with this status and `Retry-After`."""

    status: int = 503

    def __str__(self) -> str:
        return f"refuse={self.status}"


FallbackStep = ShorterOutput | NoSpeculation | OtherModel | Upstream | Refuse


class Route(msgspec.Struct, frozen=True):
    """The steps for requests to the model `name`, in the order in which they are tried."""

    name: str
    steps: tuple[FallbackStep, ...]


class Situation(msgspec.Struct, frozen=True):
    """A request that cannot be served as it came, and what is known of the alternatives.

    Attributes:
        cause: Why the last attempt ended.
        num_tried: Steps of the route that were tried or skipped.
        max_tokens: The limit of the output now; None if the context is the limit.
        speculates: Drafts may be proposed for it.
        keeps_model: The client accepts no other model.
        is_openai: The request is one of OpenAI's chat or completions, which an upstream can serve.
        left_s: Seconds until its deadline; None without one.
        unavailable: The models, and the URLs of upstreams, that cannot serve now.
        first_byte_s: Seconds until the first byte that a model or the URL of an upstream is
            predicted to need.
    """

    cause: Cause
    num_tried: int = 0
    max_tokens: int | None = None
    speculates: bool = True
    keeps_model: bool = False
    is_openai: bool = True
    left_s: float | None = None
    unavailable: frozenset[str] = frozenset()
    first_byte_s: Mapping[str, float] = {}


class Decision(msgspec.Struct, frozen=True):
    """The step to try. `num_tried` counts it and those before it."""

    step: FallbackStep
    num_tried: int


def decide(route: Route, situation: Situation) -> Decision | None:
    """The first step that may serve the request in time; None to answer with the last error.

    At the end of the route, and when no time is left, a request that the server is to blame for is
    refused with 503. A client that has reached its own limit, or sent too long a prompt, gets the
    error that says so.
    """
    left_s = situation.left_s
    if left_s is None or left_s > 0.0:
        for number in range(situation.num_tried, len(route.steps)):
            if _may_help(route.steps[number], situation):
                return Decision(route.steps[number], number + 1)
    if situation.cause in (Cause.RATE_LIMIT, Cause.MEMORY):
        return None
    return Decision(Refuse(), len(route.steps))


def _may_help(step: FallbackStep, situation: Situation) -> bool:
    cause = situation.cause
    match step:
        case ShorterOutput():
            is_shorter = situation.max_tokens is None or step.max_tokens < situation.max_tokens
            return is_shorter and cause in (Cause.RATE_LIMIT, Cause.MEMORY)
        case NoSpeculation():
            return situation.speculates and cause in (Cause.MEMORY, Cause.FAILURE)
        case OtherModel():
            return cause is not Cause.RATE_LIMIT and _is_free(step.name, 0.0, situation)
        case Upstream():
            return (
                situation.is_openai
                and cause is not Cause.RATE_LIMIT
                and _is_free(step.url, LEAST_FIRST_BYTE_S, situation)
            )
        case Refuse():
            return True


def _is_free(name: str, least_s: float, situation: Situation) -> bool:
    """Whether another model or an upstream is allowed, healthy and soon enough."""
    if situation.keeps_model or name in situation.unavailable:
        return False
    predicted_s = max(least_s, situation.first_byte_s.get(name, 0.0))
    return situation.left_s is None or predicted_s < situation.left_s


class ChainProgress:
    """How far one request has come in its route. Each step is applied to the request as it came.
    Owned by what carries the steps out: a server, or the simulator.

    Attributes:
        model: The model of the present attempt, by name.
        step: What the present attempt changes of the request; None for nothing.
    """

    def __init__(
        self, route: Route, model: str, keeps_model: bool = False, is_openai: bool = True
    ) -> None:
        self.model = model
        self.step: FallbackStep | None = None
        self._own_model = model
        self._route = route
        self._keeps_model = keeps_model
        self._is_openai = is_openai
        self._num_tried = 0
        self._max_tokens: int | None = None
        self._speculates = True

    def applied(self, request: Request) -> Request:
        """The request of the present attempt."""
        match self.step:
            case ShorterOutput(max_tokens):
                sampling = structs.replace(request.sampling, max_tokens=max_tokens)
                request = structs.replace(request, sampling=sampling)
            case NoSpeculation():
                request = structs.replace(request, speculation=False)
        self._max_tokens = request.sampling.max_tokens
        self._speculates = request.speculation
        return request

    def enter(
        self,
        cause: Cause,
        left_s: float | None,
        unavailable: Collection[str] = (),
        first_byte_s: Mapping[str, float] = MappingProxyType({}),
    ) -> FallbackStep | None:
        """Enter the step to try after an attempt that has ended by `cause`, and return it; None to
        answer with the error. The other arguments are as in `Situation`.
        """
        decision = decide(
            self._route,
            Situation(
                cause,
                num_tried=self._num_tried,
                max_tokens=self._max_tokens,
                speculates=self._speculates,
                keeps_model=self._keeps_model,
                is_openai=self._is_openai,
                left_s=left_s,
                unavailable=frozenset([*unavailable, self.model]),
                first_byte_s=first_byte_s,
            ),
        )
        if decision is None:
            return None
        self._num_tried, step = decision.num_tried, decision.step
        if not isinstance(step, Refuse):  # which is no attempt
            self.step = step
            self.model = step.name if isinstance(step, OtherModel) else self._own_model
        return step


def cause_of(error: Exception) -> Cause | None:
    """Why a request could not be served; None for what no other attempt would change."""
    if isinstance(error, EngineError):
        return Cause.FAILURE
    if not isinstance(error, RequestError):
        return None
    if error.code in _LIMIT_CODES:
        return Cause.RATE_LIMIT
    if error.code == "deadline_unreachable":
        return Cause.DEADLINE
    if error.code == "context_length_exceeded":
        return Cause.MEMORY
    return Cause.OVERLOAD if error.status in (429, 503) else None


def read_routes(section: object) -> dict[str, Route]:
    """The routes in the section `routes` of a config file, by the model's name.

    Raises:
        ConfigError: It has another form.
    """
    if not isinstance(section, dict):
        raise ConfigError("routes: must map names of models to lists of steps")
    return {str(name): _read_route(str(name), steps) for name, steps in section.items()}


def check_names(routes: Mapping[str, Route], names: Collection[str]) -> None:
    """Raise ConfigError unless all models of the routes are among `names`."""
    for route in routes.values():
        if route.name != ANY_MODEL and route.name not in names:
            raise ConfigError(f"routes: there is no model {route.name!r}; {_listed(names)}")
        for step in route.steps:
            if isinstance(step, OtherModel) and step.name not in names:
                raise ConfigError(
                    f"routes.{route.name}: there is no model {step.name!r}; {_listed(names)}"
                )


def _listed(names: Collection[str]) -> str:
    return f"the server has {', '.join(sorted(names)[:20])}"


def _read_route(name: str, steps: object) -> Route:
    where = f"routes.{name}"
    if not isinstance(steps, list) or not 1 <= len(steps) <= _MAX_STEPS:
        raise ConfigError(f"{where} must be a list of 1 to {_MAX_STEPS} steps")
    read: list[FallbackStep] = []
    for index, fields in enumerate(steps):
        step = _read_step(f"{where}[{index}]", fields)
        if isinstance(step, OtherModel) and step.name == name:
            raise ConfigError(f"{where}[{index}] leads back to {name}, where the chain began")
        if step in read:
            raise ConfigError(f"{where}[{index}] repeats {step}; a chain tries each step once")
        if any(isinstance(earlier, Refuse) for earlier in read):
            raise ConfigError(f"{where}[{index}] comes after refuse, so it is never tried")
        if isinstance(step, ShorterOutput):
            _check_shorter(f"{where}[{index}]", step, read)
        read.append(step)
    return Route(name, tuple(read))


def _check_shorter(where: str, step: ShorterOutput, before: list[FallbackStep]) -> None:
    for earlier in before:
        if isinstance(earlier, ShorterOutput) and earlier.max_tokens <= step.max_tokens:
            raise ConfigError(
                f"{where}: max_tokens is {step.max_tokens}, it must be below the "
                f"{earlier.max_tokens} of an earlier step"
            )


def _read_step(where: str, fields: object) -> FallbackStep:
    """One step. Raises ConfigError."""
    if not isinstance(fields, dict) or not fields:
        raise ConfigError(f"{where} must have one of {', '.join(_KINDS)}")
    # an upstream has the field `model` too
    kinds = [kind for kind in _KINDS if kind in fields]
    kind = "upstream" if "upstream" in kinds else kinds[0] if kinds else ""
    more = ("model", "key_env") if kind == "upstream" else ()
    for name in fields:
        if name != kind and name not in more:
            if not kind:
                raise ConfigError(f"{where} must have one of {', '.join(_KINDS)}")
            raise ConfigError(f"{where} has {str(name)[:64]!r}, which {kind} does not take")
    value = fields[kind]
    match kind:
        case "max_tokens":
            if type(value) is not int or value < 1:
                raise ConfigError(f"{where}: max_tokens is {value!r}, it must be at least 1")
            return ShorterOutput(value)
        case "speculation":
            if value is not False:
                raise ConfigError(f"{where}: speculation is {value!r}, it can only be false")
            return NoSpeculation()
        case "model":
            return OtherModel(_text(where, "model", fields))
        case "refuse":
            if value not in _REFUSALS or isinstance(value, bool):
                raise ConfigError(f"{where}: refuse is {value!r}, it must be 429 or 503")
            return Refuse(value)
    return _read_upstream(where, fields)


def _read_upstream(where: str, fields: dict[Any, Any]) -> Upstream:
    url = _text(where, "upstream", fields).rstrip("/")
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_usable = False
    if not is_usable or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(
            f"{where}: upstream is {url[:100]!r}, it must be a URL such as https://host/v1"
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(f"{where}: upstream must have no user, password, query or fragment")
    key_env = _text(where, "key_env", fields) if "key_env" in fields else ""
    return Upstream(url, _text(where, "model", fields), key_env)


def _text(where: str, name: str, fields: dict[Any, Any]) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ConfigError(f"{where}: {name} is {value!r}, it must be a name")
    return value
