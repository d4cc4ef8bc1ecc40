"""OpenTelemetry: one span per HTTP request that generates, with a child per activity of each
sequence, sent to `--otlp-traces-endpoint`.

The spans are made when a request has ended, from the timings of its sequences, so tracing costs
nothing while it runs. The W3C `traceparent` of the request becomes the parent. Attributes have
vLLM's names (vllm/tracing.py). `opentelemetry` is the extra `otel` and is imported only here, when
the flag is set; its own environment variables (`OTEL_*`) apply.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quickstep.errors import ConfigError, how_to_install
from quickstep.server.generate.generation import Choice, Generation

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_NS = 1_000_000_000
# How long a batch is tried to be sent, and so how long a missing receiver delays the server's end.
_EXPORT_S = 2.0
_TIMEOUT_VARIABLES = ("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")


def check_tracing(endpoint: str | None) -> None:
    """Raise ConfigError unless spans can be sent to `endpoint`; None sends none."""
    if endpoint is None:
        return
    if urlsplit(endpoint).scheme not in ("http", "https"):
        raise ConfigError(
            f"--otlp-traces-endpoint is {endpoint!r}; it takes OTLP over HTTP, such as "
            "http://localhost:4318/v1/traces"
        )
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry: {how_to_install('otel')} ({error})"
        ) from None


def open_tracer(endpoint: str | None) -> RequestTracer | None:
    """A tracer that sends to `endpoint` from a thread of its own; None without an endpoint."""
    if endpoint is None:
        return None
    check_tracing(endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    is_set = any(name in os.environ for name in _TIMEOUT_VARIABLES)
    timeout_s = None if is_set else _EXPORT_S
    return RequestTracer(OTLPSpanExporter(endpoint=endpoint, timeout=timeout_s))


class RequestTracer:
    """Makes the spans of ended requests. `close` sends the last ones.

    `exporter` receives them in batches; `clock` is that of the timings.
    """

    def __init__(self, exporter: SpanExporter, clock: Callable[[], float] = time.monotonic) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        name = os.environ.get("OTEL_SERVICE_NAME", "quickstep")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("quickstep")
        self._clock = clock

    def add(
        self,
        generation: Generation,
        headers: Mapping[str, str],
        arrival_s: float,
        ttft_s: float | None,
    ) -> None:
        """Make the spans of a request that ends now and arrived at `arrival_s`."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now_s, now_ns = self._clock(), time.time_ns()

        def epoch_ns(at_s: float) -> int:
            return now_ns - int((now_s - at_s) * _NS)

        parent = TraceContextTextMapPropagator().extract(headers)
        span = self._tracer.start_span(
            "llm_request",
            context=parent,
            kind=SpanKind.SERVER,
            attributes=_attributes(generation, now_s - arrival_s, ttft_s),
            start_time=epoch_ns(arrival_s),
        )
        context = set_span_in_context(span, parent)
        for choice in generation.choices:
            for name, begin_s, end_s in _activities(choice):
                child = self._tracer.start_span(
                    name,
                    context=context,
                    attributes={"quickstep.choice": choice.index},
                    start_time=epoch_ns(begin_s),
                )
                child.end(epoch_ns(end_s))
        span.end(now_ns)

    def close(self) -> None:
        """Send what is not sent yet, and end the thread. It may wait for the receiver."""
        self._provider.shutdown()


def _activities(choice: Choice) -> list[tuple[str, float, float]]:
    """(name, begin, end) in order."""
    timings = choice.timings
    if timings is None:
        return []
    changes = [(activity.value, since_s) for activity, since_s in timings.activities]
    ends = [*changes, ("", timings.finished_s)]
    return [(name, begin_s, end_s) for (name, begin_s), (_, end_s) in pairwise(ends)]


def _attributes(generation: Generation, e2e_s: float, ttft_s: float | None) -> dict[str, Any]:
    request, usage = generation.request, generation.usage
    sampling = request.sampling
    attributes: dict[str, Any] = {
        "gen_ai.response.model": request.model,
        "gen_ai.request.id": request.request.request_id,
        "gen_ai.request.n": sampling.n,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.prompt_tokens": usage.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": usage.num_output_tokens,
        "gen_ai.usage.num_sequences": len(generation.choices),
        "gen_ai.latency.e2e": e2e_s,
        "quickstep.cached_tokens": usage.num_cached_tokens,
    }
    if sampling.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
    if ttft_s is not None:
        attributes["gen_ai.latency.time_to_first_token"] = ttft_s
    timings = [choice.timings for choice in generation.choices if choice.timings is not None]
    if timings:
        attributes["gen_ai.latency.time_in_queue"] = max(timing.queue_s for timing in timings)
        attributes["quickstep.device_seconds"] = sum(timing.device_s for timing in timings)
    reasons = {choice.finish_reason for choice in generation.choices}
    names = sorted(reason.openai for reason in reasons if reason is not None)
    attributes["gen_ai.response.finish_reasons"] = names
    return attributes
