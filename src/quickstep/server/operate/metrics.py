"""`/metrics`: Prometheus text with vLLM's names, labels and buckets, under the prefix `quickstep:`
or `MetricsOptions.prefix`. Labels have values of this server only, so a client adds no series.

`ServerMetrics` belongs to one app and has the `ModelMetrics` of each model. What a request took is
observed by its `RequestMeter`, from the deltas as they leave and from the timings that the
scheduler kept; gauges of the engine are read from `stats()` when Prometheus asks.

`log_traffic` writes one log line every ten seconds while there is traffic: rates, queue, cache.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from quickstep.core.accounting import AdapterStats, KVTierStats, Totals
from quickstep.engine.interface import ServedEngine
from quickstep.engine.stats import EngineStats, ReplicaStats
from quickstep.server.fallback.chain import Fallback
from quickstep.server.generate.api import NO_HEADERS
from quickstep.server.generate.generation import Generation, ParsedRequest
from quickstep.server.kept_streams.kept_stream import KeptStreams
from quickstep.server.models.served_model import ServedModel
from quickstep.server.models.server_state import ServerState
from quickstep.server.options import MetricsOptions
from quickstep.types import Delta, FinishReason, StepRecord

if TYPE_CHECKING:
    from quickstep.server.operate.tracing import RequestTracer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# vLLM's buckets (vllm/v1/metrics/loggers.py)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHOICES = (1, 2, 5, 10, 20)
_ENGINE = "0"  # vLLM's label for the engines of a server
_LABELS = ("model_name", "engine")
_LOG = logging.getLogger("quickstep.server")
_LOG_EVERY_S = 10.0


class ServerMetrics(Collector):
    """The metrics of all models; a family has the samples of each."""

    def __init__(self, models: Iterable[ServedModel], options: MetricsOptions) -> None:
        self.tracer = _tracer(options.otlp_traces_endpoint)
        self._options = options
        self._by_model: dict[str, ModelMetrics] = {}
        self._server: ServerState | None = None
        for model in models:
            self.add(model)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def add(self, model: ServedModel) -> None:
        """A model was loaded for the first time."""
        self._server = model.server
        self._by_model[model.name] = ModelMetrics(
            model.engine, model.name, self._options, self.tracer
        )

    def of(self, model: ServedModel) -> ModelMetrics:
        """The metrics of one model."""
        return self._by_model[model.name]

    def of_request(
        self, model: ServedModel, request: ParsedRequest, headers: Mapping[str, str] = NO_HEADERS
    ) -> RequestMeter:
        """The meter of a request that arrives now; `headers` may have its W3C trace context."""
        return self.of(model).meter(request, headers)

    def of_prompts(self, model: ServedModel, prompt_lens: Sequence[int]) -> EmbeddingMeter:
        """The meter of prompts that are embedded, and arrive now."""
        return EmbeddingMeter(self.of(model), prompt_lens)

    def collect(self) -> Iterable[Metric]:
        """One family per figure."""
        families: dict[str, Metric] = {}
        for metrics in tuple(self._by_model.values()):
            for family in metrics.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        if self._server is not None:
            for family in kept_stream_families(self._options.prefix, self._server.kept_streams):
                families[family.name] = family
        if self._server is not None and self._server.fallbacks.routes:
            family = fallback_family(self._options.prefix, self._server.fallbacks.counts)
            families[family.name] = family
        return families.values()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        # the module imports a web server, which is not needed before the first scrape
        from prometheus_client.exposition import generate_latest

        return generate_latest(self._registry)


def kept_stream_families(prefix: str, streams: KeptStreams) -> Iterator[Metric]:
    """How many streams can be read again, and their size."""
    for name, text, value in (
        (
            "kept_streams",
            "Responses that continue without their client, or can be read again.",
            streams.num_streams,
        ),
        ("kept_stream_bytes", "Bytes of these responses.", streams.num_bytes),
    ):
        yield GaugeMetricFamily(f"{prefix}:{name}", text, value)


def fallback_family(prefix: str, counts: Mapping[Fallback, int]) -> Metric:
    """How often the steps of fallback chains were tried."""
    family = CounterMetricFamily(
        f"{prefix}:fallbacks",
        "Steps of fallback chains that were tried.",
        labels=("route", "step", "cause"),
    )
    for fallback, count in counts.items():
        family.add_metric((fallback.route, fallback.step, fallback.cause), count)
    return family


class ModelMetrics:
    """Counts and histograms of one model: plain numbers, of which families are made when they are
    read. The event loop owns them.
    """

    def __init__(
        self,
        engine: ServedEngine,
        model: str,
        options: MetricsOptions,
        tracer: RequestTracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.model = model
        self.options = options
        self.num_embedded = 0  # embedded prompts
        self.num_generated_tokens = 0
        self._num_prompt_tokens = 0
        self._num_ends = {reason.openai: 0 for reason in FinishReason}
        tokens = _one_two_five(engine.max_model_len)
        self._histograms = {
            name: _Histogram(text, buckets)
            for name, text, buckets in (
                ("time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_S),
                ("inter_token_latency_seconds", "Gap between consecutive tokens.", _TOKEN_S),
                ("request_time_per_output_token_seconds", "Mean gap of a request.", _TOKEN_S),
                ("e2e_request_latency_seconds", "Arrival to the end.", _REQUEST_S),
                ("request_queue_time_seconds", "Time waiting.", _REQUEST_S),
                ("request_prefill_time_seconds", "Time in prefill.", _REQUEST_S),
                ("request_decode_time_seconds", "Time in decode.", _REQUEST_S),
                ("request_inference_time_seconds", "Prefill and decode.", _REQUEST_S),
                ("request_prompt_tokens", "Prompt tokens of a request.", tokens),
                ("request_generation_tokens", "Output tokens of a request.", tokens),
                ("request_params_n", "The field n of a request.", _CHOICES),
                ("request_params_max_tokens", "The field max_tokens of a request.", tokens),
                ("iteration_tokens_total", "Tokens of a step.", _STEP_TOKENS),
            )
        }
        self.token_gaps = self._histograms["inter_token_latency_seconds"]
        self.tracer = tracer
        self.goodput = _Goodput(options.goodput_ms) if options.goodput_ms else None
        self._gauges = EngineGauges(engine, model, options.prefix)
        engine.step_log.follow_steps(_StepTokens(self._histograms["iteration_tokens_total"]))

    def meter(self, request: ParsedRequest, headers: Mapping[str, str]) -> RequestMeter:
        """The meter of a request that arrives now."""
        sampling = request.sampling
        self.observe("request_params_n", sampling.n)
        if sampling.max_tokens is not None:
            self.observe("request_params_max_tokens", sampling.max_tokens)
        return RequestMeter(self, len(request.prompts) * sampling.n, headers)

    def observe(self, name: str, value: float) -> None:
        """One observation of a histogram."""
        self._histograms[name].observe(max(0.0, value))

    def count_prompt(self, num_tokens: int) -> None:
        """Count the tokens of a prompt that is computed, or whose request ended before."""
        self._num_prompt_tokens += num_tokens

    def count_end(self, reason: FinishReason) -> None:
        """Count a choice that ended."""
        self._num_ends[reason.openai] += 1

    def collect(self) -> Iterator[Metric]:
        """One family per figure."""
        prefix, labels = self.options.prefix, (self.model, _ENGINE)
        for name, histogram in self._histograms.items():
            yield histogram.family(f"{prefix}:{name}", labels)
        for name, text, value in (
            ("generation_tokens", "Output tokens so far.", self.num_generated_tokens),
            (
                "prompt_tokens",
                "Prompt tokens, counted with the first token of their answer or at its end.",
                self._num_prompt_tokens,
            ),
        ):
            counter = CounterMetricFamily(f"{prefix}:{name}", text, labels=_LABELS)
            counter.add_metric(labels, value)
            yield counter
        yield _counts(
            f"{prefix}:request_success",
            "Choices that ended, by OpenAI's finish reason.",
            labels,
            "finished_reason",
            self._num_ends,
        )
        if self.goodput is not None:
            yield from self.goodput.families(prefix, labels)
        yield from self._gauges.collect()


def _counts(
    name: str, text: str, labels: Sequence[str], more: str, counts: Mapping[str, int]
) -> Metric:
    """A counter with one more label, and a sample for each of its values."""
    family = CounterMetricFamily(name, text, labels=(*_LABELS, more))
    for value, count in counts.items():
        family.add_metric((*labels, value), count)
    return family


class _Histogram:
    """Counts of observations by bucket. The histogram of Prometheus' client has an object with a
    lock per bucket, and so took longer to make than the rest of an app.
    """

    def __init__(self, text: str, buckets: Sequence[float]) -> None:
        self._text = text
        self.buckets = buckets  # the largest value of each, ascending; one more has the rest
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.buckets, value)] += 1
        self.sum += value

    def family(self, name: str, labels: Sequence[str]) -> Metric:
        """The histogram as it is now."""
        family = HistogramMetricFamily(name, self._text, labels=_LABELS)
        bounds = map(floatToGoString, (*self.buckets, inf))
        family.add_metric(labels, list(zip(bounds, accumulate(self.counts), strict=True)), self.sum)
        return family


class _StepTokens:
    """Observes the tokens of each step: a follower of the step log."""

    def __init__(self, histogram: _Histogram) -> None:
        self._histogram = histogram

    def add_step(self, record: StepRecord) -> None:
        """A step was committed."""
        self._histogram.observe(record.num_prefill_tokens + record.num_decode_tokens)


class _Goodput:
    """Counts the requests that kept every target, and those that missed each."""

    def __init__(self, limits_ms: Mapping[str, float]) -> None:
        self._limits_s = {name: ms / 1e3 for name, ms in limits_ms.items()}
        self._num_requests = {"true": 0, "false": 0}  # by whether they kept all targets
        self._num_missed = dict.fromkeys(limits_ms, 0)

    def count(self, ttft_s: float | None, tpot_s: float | None, e2el_s: float) -> None:
        """Count a request. A time is None if the request had too few tokens for it."""
        measured = {"ttft": ttft_s, "tpot": tpot_s, "e2el": e2el_s}
        is_good = True
        for name, limit_s in self._limits_s.items():
            seconds = measured[name]
            if seconds is not None and seconds > limit_s:
                is_good = False
                self._num_missed[name] += 1
        self._num_requests["true" if is_good else "false"] += 1

    def families(self, prefix: str, labels: Sequence[str]) -> Iterator[Metric]:
        """The counts as they are now."""
        yield _counts(
            f"{prefix}:goodput_requests",
            "Requests that ended by themselves, by whether they kept all targets of --goodput.",
            labels,
            "good",
            self._num_requests,
        )
        yield _counts(
            f"{prefix}:goodput_missed",
            "Requests that missed a target of --goodput.",
            labels,
            "target",
            self._num_missed,
        )


def _tracer(endpoint: str | None) -> RequestTracer | None:
    if endpoint is None:
        return None
    from quickstep.server.operate.tracing import open_tracer

    return open_tracer(endpoint)


def _one_two_five(max_value: int) -> tuple[int, ...]:
    """1, 2, 5, 10, ... up to `max_value`: vLLM's buckets of token counts."""
    powers = (10**exponent for exponent in range(len(str(max_value))))
    return tuple(
        digit * power for power in powers for digit in (1, 2, 5) if digit * power <= max_value
    )


class RequestMeter:
    """Observes one request, from its arrival to its end."""

    def __init__(
        self, metrics: ModelMetrics, num_choices: int, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        self._metrics = metrics
        self._headers = headers
        self._arrival = metrics.clock()
        self._first: list[float | None] = [None] * num_choices
        self._last: list[float | None] = [None] * num_choices
        self._num_tokens = [0] * num_choices
        self._uncounted: dict[int, int] = {}  # tokens of prompts that are not counted, by place
        self._choices_per_prompt = 1
        self._closed = False

    def opened(self, generation: Generation) -> None:
        """The engine has accepted all prompts of the request."""
        self._choices_per_prompt = generation.request.sampling.n
        firsts = generation.choices[:: self._choices_per_prompt]
        lens = [len(generation.prompt_token_ids(choice)) for choice in firsts]
        self._uncounted = dict(enumerate(lens))

    def observe(self, delta: Delta) -> None:
        """Observe a delta before it is sent."""
        metrics = self._metrics
        if not delta.token_ids:
            return
        now = metrics.clock()
        last = self._last[delta.index]
        if last is None:
            self._first[delta.index] = now
            prompt = delta.index // self._choices_per_prompt
            metrics.count_prompt(self._uncounted.pop(prompt, 0))
            metrics.observe("time_to_first_token_seconds", now - self._arrival)
        else:  # of every token, so without a call
            gap, gaps = max(0.0, now - last), metrics.token_gaps
            gaps.counts[bisect_left(gaps.buckets, gap)] += 1
            gaps.sum += gap
        # tokens that came together have no gap between them
        metrics.token_gaps.counts[0] += len(delta.token_ids) - 1
        self._last[delta.index] = now
        self._num_tokens[delta.index] += len(delta.token_ids)
        metrics.num_generated_tokens += len(delta.token_ids)

    def close(self, generation: Generation) -> None:
        """The request is over, however it ended. Idempotent."""
        if self._closed:
            return
        self._closed = True
        metrics = self._metrics
        metrics.count_prompt(sum(self._uncounted.values()))
        metrics.observe("request_prompt_tokens", generation.num_prompt_tokens)
        metrics.observe("request_generation_tokens", generation.usage.num_output_tokens)
        metrics.observe("e2e_request_latency_seconds", metrics.clock() - self._arrival)
        for choice in generation.choices:
            metrics.count_end(choice.finish_reason or FinishReason.ABORTED)
            timings = choice.timings
            if timings is None:
                continue
            metrics.observe("request_queue_time_seconds", timings.queue_s)
            metrics.observe("request_prefill_time_seconds", timings.prefill_s)
            metrics.observe("request_decode_time_seconds", timings.decode_s)
            metrics.observe("request_inference_time_seconds", timings.prefill_s + timings.decode_s)
            gaps = timings.num_new_tokens - 1
            if gaps > 0 and timings.first_token_s is not None:
                span = timings.finished_s - timings.first_token_s
                metrics.observe("request_time_per_output_token_seconds", span / gaps)
        if metrics.tracer is not None:
            metrics.tracer.add(generation, self._headers, self._arrival, self._ttft_s)
        if metrics.goodput is not None and not _is_aborted(generation):
            self._count_goodput(metrics.goodput, generation)

    @property
    def _ttft_s(self) -> float | None:
        firsts = [first for first in self._first if first is not None]
        return min(firsts) - self._arrival if firsts else None

    def _count_goodput(self, goodput: _Goodput, generation: Generation) -> None:
        """Count the request; without a token, or after a failure, it misses every target."""
        means = [
            (last - first) / (num_tokens - 1)
            for first, last, num_tokens in zip(
                self._first, self._last, self._num_tokens, strict=True
            )
            if first is not None and last is not None and num_tokens > 1
        ]
        e2el_s = self._metrics.clock() - self._arrival
        ends = [choice.finish_reason for choice in generation.choices]
        has_failed = any(reason is not None and reason.is_failure for reason in ends)
        has_tokens = self._ttft_s is not None or generation.request.request.prompt_only
        if has_failed or not has_tokens:
            goodput.count(inf, inf, inf)
            return
        goodput.count(self._ttft_s, max(means, default=None), e2el_s)


def _is_aborted(generation: Generation) -> bool:
    """Whether the client left before the end."""
    ends = [choice.finish_reason for choice in generation.choices]
    return any(reason in (None, FinishReason.ABORTED) for reason in ends)


class EmbeddingMeter:
    """Observes the prompts of one embeddings request, each of which is a request to the engine."""

    def __init__(self, metrics: ModelMetrics, prompt_lens: Sequence[int]) -> None:
        self._metrics = metrics
        self._prompt_lens = prompt_lens
        self._arrival = metrics.clock()
        self._num_accepted = 0
        self._num_ended = 0

    def accepted(self) -> None:
        """Count a prompt that the engine accepted."""
        self._num_accepted += 1

    def observe(self, delta: Delta) -> None:
        """Observe a delta of a prompt; usually its end."""
        if delta.finish_reason is None:
            return
        self._num_ended += 1
        self._metrics.count_end(delta.finish_reason)
        if delta.finish_reason is FinishReason.POOLED:
            self._metrics.num_embedded += 1
        if delta.timings is not None:
            self._metrics.observe("request_queue_time_seconds", delta.timings.queue_s)
            self._metrics.observe("request_prefill_time_seconds", delta.timings.prefill_s)

    def close(self) -> None:
        """The request is over, however it ended."""
        metrics = self._metrics
        if not self._num_accepted:
            return
        for _ in range(self._num_accepted - self._num_ended):
            metrics.count_end(FinishReason.ABORTED)
        for prompt_len in self._prompt_lens:
            metrics.count_prompt(prompt_len)
            metrics.observe("request_prompt_tokens", prompt_len)
        metrics.observe("e2e_request_latency_seconds", metrics.clock() - self._arrival)


class EngineGauges(Collector):
    """Reads the engine's `stats()` at each scrape."""

    def __init__(self, engine: ServedEngine, model: str, prefix: str) -> None:
        self._engine = engine
        self._model = model
        self._prefix = prefix
        self._idle_s = 0.0  # reported; a late commit may reduce the engine's for a moment

    def collect(self) -> Iterable[Metric]:
        """One family per figure."""
        stats = self._engine.stats()
        load = stats.scheduler
        totals, blocks = load.totals, load.blocks
        num_blocks = blocks.num_used + blocks.num_cached + blocks.num_free
        gauges = (
            ("num_requests_running", "Sequences in the batch.", load.num_running),
            (
                "num_requests_waiting",
                "Sequences in the queue, preempted ones included.",
                load.num_waiting + load.num_preempted,
            ),
            (
                "max_model_len",
                "Tokens of the longest sequence, prompt and output: what fits into the KV cache.",
                self._engine.max_model_len,
            ),
            ("num_requests_paused", "Sequences paused for slow readers.", load.num_paused),
            (
                "predicted_queue_time_seconds",
                "How long one more request would wait, as it is predicted now.",
                stats.admission.wait_s(stats.admission.num_waiting),
            ),
            (
                "kv_cache_usage_perc",
                "Fraction of the KV blocks in use.",
                blocks.num_used / num_blocks,
            ),
        )
        counters = (
            ("num_preemptions", "Sequences put back to the queue.", totals.num_preemptions),
            ("num_pauses", "Requests paused for their readers.", totals.num_pauses),
            ("prefix_cache_queries", "Prompt tokens looked up.", totals.prefix_query_tokens),
            ("prefix_cache_hits", "Prompt tokens found cached.", totals.prefix_hit_tokens),
            (
                "spec_decode_num_draft_tokens",
                "Draft tokens that were checked.",
                totals.num_drafts,
            ),
            (
                "spec_decode_num_accepted_tokens",
                "Draft tokens that were accepted.",
                totals.num_accepted,
            ),
            (
                "spec_decode_num_failures",
                "Times a proposer of drafts failed, and was off for some steps.",
                totals.num_proposer_failures,
            ),
            ("engine_steps", "Steps run.", totals.num_steps),
            (
                "engine_prefill_tokens",
                "Prompt tokens computed so far, without those that were cached.",
                totals.num_prefill_tokens,
            ),
            ("engine_output_tokens", "Tokens generated, read or not.", totals.num_output_tokens),
            ("engine_busy_seconds", "Measured seconds of all steps.", totals.busy_s),
            (
                "engine_exchange_seconds",
                "Of these, rank 0 waited for other ranks.",
                totals.exchange_s,
            ),
            (
                "engine_bubble_seconds",
                "Stages of a pipeline had no step to compute while others did, their mean.",
                totals.bubble_s,
            ),
            ("engine_restarts", "Times the engine was started again.", stats.num_restarts),
            (
                "moved_requests",
                "Times a request continued on another engine, or on a restarted one.",
                stats.num_moves,
            ),
            (
                "handovers",
                "Times one engine has computed the prompt of a request for another one.",
                stats.num_handovers,
            ),
        )
        for name, text, value in gauges:
            yield self._filled(GaugeMetricFamily, name, text, value)
        for name, text, value in counters:
            yield self._filled(CounterMetricFamily, name, text, value)
        yield self._seconds(totals)
        yield self._cache_config(num_blocks)
        if load.adapters is not None:
            yield from self._adapters(load.adapters)
        if load.kv_tier is not None:
            yield from self._kv_tier(load.kv_tier)
        if stats.replicas:
            yield from self._replicas(stats.replicas)

    def _kv_tier(self, tier: KVTierStats) -> Iterable[Metric]:
        """KV blocks in `--kv-cache-dir`."""
        for name, text, gauge in (
            ("kv_store_blocks", "KV blocks that are stored.", tier.num_blocks),
            ("kv_store_bytes", "What they take on the disk.", tier.num_bytes),
            (
                "kv_store_is_written",
                "1 while blocks are stored; 0 after the disk was full.",
                tier.num_saving,
            ),
        ):
            yield self._filled(GaugeMetricFamily, name, text, gauge)
        for name, text, count in (
            ("kv_store_saved_blocks", "KV blocks that were stored.", tier.num_saved),
            (
                "kv_store_restored_blocks",
                "Stored KV blocks that were read instead of being computed.",
                tier.num_restored,
            ),
            (
                "kv_store_lost_blocks",
                "Stored KV blocks that could not be read, or had changed.",
                tier.num_lost,
            ),
        ):
            yield self._filled(CounterMetricFamily, name, text, count)

    def _replicas(self, replicas: Sequence[ReplicaStats]) -> Iterable[Metric]:
        """Each of several engines."""
        up = self._of_replicas("replica_up", "1 while the replica gets requests, else 0.")
        draining = self._of_replicas(
            "replica_draining", "1 while the replica is drained or restarted, else 0."
        )
        running = self._of_replicas("replica_requests_running", "Sequences in its batch.")
        waiting = self._of_replicas("replica_requests_waiting", "Sequences in its queue.")
        for replica in replicas:
            labels = [self._model, str(replica.replica)]
            up.add_metric(labels, float(replica.is_up))
            draining.add_metric(labels, float(replica.is_draining))
            running.add_metric(labels, replica.num_running)
            waiting.add_metric(labels, replica.num_waiting)
        yield from (up, draining, running, waiting)

    def _of_replicas(self, name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=_LABELS)

    def _adapters(self, adapters: AdapterStats) -> Iterable[Metric]:
        """LoRA adapters; those of requests are label values, as in vLLM."""
        for name, text, gauge in (
            ("lora_adapters_resident", "Adapters in compute memory.", adapters.num_resident),
            ("lora_adapter_bytes", "Compute memory of adapters.", adapters.num_bytes),
        ):
            yield self._filled(GaugeMetricFamily, name, text, gauge)
        for name, text, count in (
            ("lora_adapter_loads", "Loads of adapters into compute memory.", adapters.num_loads),
            ("lora_adapter_evictions", "Evictions of adapters.", adapters.num_evictions),
        ):
            yield self._filled(CounterMetricFamily, name, text, count)
        labels = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
        info = GaugeMetricFamily(
            f"{self._prefix}:lora_requests_info", "Adapters of live requests.", labels=labels
        )
        names = (",".join(adapters.waiting), ",".join(adapters.running))
        info.add_metric([str(adapters.max_loras), *names], time.time())
        yield info

    def _filled(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        value: float,
    ) -> Metric:
        metric = family(f"{self._prefix}:{name}", text, labels=_LABELS)
        metric.add_metric([self._model, _ENGINE], value)
        return metric

    def _seconds(self, totals: Totals) -> Metric:
        """Every second from the first plan to the last commit, by where it went."""
        metric = CounterMetricFamily(
            f"{self._prefix}:engine_seconds",
            "Wall time by what it went to; the sum is all of it.",
            labels=[*_LABELS, "part"],
        )
        self._idle_s = max(self._idle_s, totals.idle_s)
        parts = {
            "attributed": totals.attributed_s,
            "recomputed": totals.recomputed_s,
            "rejected": totals.rejected_s,
            "unclaimed": totals.unclaimed_s,
            "idle": self._idle_s,
        }
        for part, seconds in parts.items():
            metric.add_metric([self._model, _ENGINE, part], seconds)
        return metric

    def _cache_config(self, num_blocks: int) -> Metric:
        metric = GaugeMetricFamily(
            f"{self._prefix}:cache_config_info",
            "Sizes of the KV cache, as labels.",
            labels=["engine", "block_size", "num_gpu_blocks"],
        )
        sizes = (_ENGINE, str(self._engine.block_size), str(num_blocks))
        metric.add_metric(sizes, 1.0)
        return metric


class TrafficLog:
    """Compares two moments of the engine."""

    def __init__(self, stats: EngineStats) -> None:
        self._totals: Totals = stats.scheduler.totals
        self._now_s = stats.now_s
        self._num_embedded = 0

    def line(self, stats: EngineStats, num_embedded: int = 0) -> str | None:
        """The log line about what happened since the last call; None if nothing did.

        `num_embedded` counts the prompts embedded so far.
        """
        load, before = stats.scheduler, self._totals
        totals, seconds = load.totals, stats.now_s - self._now_s
        self._totals, self._now_s = totals, stats.now_s
        embedded = num_embedded - self._num_embedded
        self._num_embedded = num_embedded
        if totals.num_steps == before.num_steps and not stats.has_work:
            return None
        blocks = load.blocks
        num_blocks = blocks.num_used + blocks.num_cached + blocks.num_free
        looked_up = totals.prefix_query_tokens - before.prefix_query_tokens
        found = totals.prefix_hit_tokens - before.prefix_hit_tokens
        line = (
            f"prompt {_rate(totals.num_prefill_tokens - before.num_prefill_tokens, seconds)}, "
            f"generation {_rate(totals.num_output_tokens - before.num_output_tokens, seconds)}, "
            f"running {load.num_running}, waiting {load.num_waiting + load.num_preempted}, "
            f"KV blocks in use {blocks.num_used / num_blocks:.1%}, "
            f"prefix cache hits {found / looked_up if looked_up else 0:.1%}"
        )
        return f"{line}, embedded {embedded}" if embedded else line


async def log_traffic(engine: ServedEngine, metrics: ModelMetrics) -> None:
    """Log the traffic until cancelled."""
    log = TrafficLog(engine.stats())
    while True:
        await asyncio.sleep(_LOG_EVERY_S)
        line = log.line(engine.stats(), metrics.num_embedded)
        if line is not None:
            _LOG.info("%s", line)


def _rate(num_tokens: int, seconds: float) -> str:
    return f"{num_tokens / seconds if seconds > 0 else 0:.1f} tokens/s"
