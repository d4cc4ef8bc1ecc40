"""A scripted engine for the tests of the HTTP surface.

It answers every prompt with the words of a script, one token each, through the same face as the
real engine, and counts the blocks that open streams hold. No model, no torch.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from quickstep.core.accounting import SchedulerStats, Totals
from quickstep.core.admission import AdmissionState
from quickstep.core.resources.block_pool import PoolStats
from quickstep.engine.adapters import LoadedAdapter
from quickstep.engine.records.step_log import SequenceRecord, StepLog
from quickstep.engine.retrieval.card import Retrieval, Scoring
from quickstep.engine.stats import EngineState, EngineStats
from quickstep.errors import EngineError, PromptTooLong, RequestError
from quickstep.model.sizing import MemoryPlan
from quickstep.text.message_content import text_of
from quickstep.text.tool_calls.formats import OutputFormats, formats_of
from quickstep.types import (
    Activity,
    CacheMiss,
    Delta,
    FinishReason,
    Pooling,
    PromptProgress,
    Request,
    RequestClass,
    SamplingParams,
    SequenceTimings,
    SlotPrefix,
    TokenLogprobs,
)

WORDS = ("Hello", " world", ",", " this", " is", " a", " test", ".")
END_ID = 255
SPECIAL_IDS = {"<tool_call>": 201, "[TOOL_CALLS]": 202}


class FakeTokenizer:
    """Ids 0-7 are the script's words, the others bytes; text is encoded by its bytes."""

    vocab_size = 256
    eos_token_ids = frozenset({END_ID})
    special_tokens: Mapping[str, str] = MappingProxyType({"eos_token": "<end>"})

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + list(text.encode())

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def encode_pair(self, first: str, second: str) -> list[int]:
        return [1, *first.encode(), 2, *second.encode(), 2]

    def least_tokens(self, text: str) -> int:
        return len(text.encode())

    def token_id(self, text: str) -> int | None:
        return SPECIAL_IDS.get(text)

    def piece(self, token_id: int) -> str | None:
        return f"piece-{token_id}"

    def is_special(self, token_id: int) -> bool:
        return token_id in SPECIAL_IDS.values()

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < len(WORDS):
            return WORDS[token_id].encode()
        return b"<end>" if token_id == END_ID else bytes([token_id])


@dataclass(slots=True)
class FakeTemplate:
    formats: OutputFormats = field(
        default_factory=lambda: formats_of("{{ tools }}<tool_call>{{ message.tool_calls }}")
    )
    rendered: list[Mapping[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    source: str = "{{ messages }}"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        messages = [
            message
            if message["content"] is None
            else {**message, "content": text_of(message["content"])}
            for message in messages
        ]  # as a template that reads no parts
        self.rendered.extend(messages)
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        if continue_final_message:
            return "\n".join(lines)
        lines += [
            f"calls={message['tool_calls']}" for message in messages if "tool_calls" in message
        ]
        lines += [f"tool={json.dumps(tool)}" for tool in tools or ()]
        lines += [f"{name}={value}" for name, value in (extra or {}).items()]
        self.texts.append("\n".join(lines + ["assistant:"] * add_generation_prompt))
        return self.texts[-1]


@dataclass(slots=True)
class Script:
    """What the engine does with a request: words, then this end; `gate` holds every delta back.

    Words of one's own carry a token each that says nothing of them.
    """

    reason: FinishReason = FinishReason.EOS
    error: str = ""
    raises: BaseException | None = None
    endless: bool = False
    gate: asyncio.Event | None = None
    words: tuple[str, ...] = WORDS
    stop_reason: int | str | None = None
    ignored: tuple[str, ...] = ()


@dataclass(slots=True)
class Submitted:
    """What arrived at `stream`."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int
    tenant: str
    cache_salt: str
    deadline_s: float | None = None
    pooling: Pooling | None = None
    request_id: str = field(default="", compare=False)
    endpoint: str = field(default="", compare=False)
    request_class: RequestClass = RequestClass.INTERACTIVE
    ttft_deadline_s: float | None = None
    speculation: bool = True
    adapter: str = ""
    reports_progress: bool = False
    retain_s: float = 0.0
    received_s: float | None = field(default=None, compare=False)


class FakeStream:
    def __init__(self, engine: FakeEngine, item: Submitted, request_id: str) -> None:
        self.request_id = request_id
        self.prompt_token_ids = item.prompt
        self.seed = 1234 if item.sampling.seed is None else item.sampling.seed
        self.ignored = engine.script.ignored
        self._engine = engine
        self._item = item
        self._sampling = item.sampling
        self._deltas = self._run()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas

    async def accepted(self) -> None:
        """At once."""

    async def aclose(self) -> None:
        self._engine.open_streams.discard(self)

    async def _run(self) -> AsyncIterator[Delta]:
        script = self._engine.script
        if script.raises:
            raise script.raises
        if self._item.pooling is not None:
            yield self._embedded()
            self._engine.open_streams.discard(self)
            return
        for index in range(self._sampling.n):
            async for delta in self._sequence(index):
                yield delta
        self._engine.open_streams.discard(self)

    async def _sequence(self, index: int) -> AsyncIterator[Delta]:
        script = self._engine.script
        limit = 1000 if self._sampling.max_tokens is None else self._sampling.max_tokens
        emitted = 0
        words = script.words
        if not index and self._item.reports_progress:
            num_tokens = len(self.prompt_token_ids)
            for num_processed in (num_tokens // 2, num_tokens):
                yield Delta(index, progress=PromptProgress(1, num_processed, num_processed / 8))
        if not index and self._sampling.prompt_logprobs is not None:
            yield Delta(index, prompt_logprobs=self._prompt_logprobs())
        while script.endless or emitted < min(limit, len(words)):
            if script.gate:
                await script.gate.wait()
            await asyncio.sleep(0)
            token_id = emitted % len(WORDS)
            self._engine.num_steps += 1
            word = words[emitted % len(words)]
            yield Delta(index, word, (token_id,), self._logprobs(token_id))
            emitted += 1
        reason = script.reason
        if reason is FinishReason.EOS and limit <= len(words):
            reason = FinishReason.MAX_TOKENS
        end = (END_ID,) * (reason is FinishReason.EOS)
        logprobs = self._logprobs(END_ID) if end else ()
        timings = self._timings(emitted + len(end))
        self._log(index, reason, timings)
        stopped_by = script.stop_reason
        yield Delta(index, "", end, logprobs, reason, stopped_by, timings, script.error)

    def _embedded(self) -> Delta:
        """The prompt's length on a circle tells which prompt it was; MEAN and LAST differ."""
        if self._engine.script.reason is FinishReason.DEADLINE:
            return Delta(0, finish_reason=FinishReason.DEADLINE)
        angle = float(len(self.prompt_token_ids)) + (self._item.pooling is Pooling.MEAN)
        vector = (math.cos(angle), math.sin(angle))
        self._log(0, FinishReason.POOLED, self._timings(0))
        return Delta(0, finish_reason=FinishReason.POOLED, embedding=vector)

    def _log(self, index: int, reason: FinishReason, timings: SequenceTimings) -> None:
        self._engine.step_log.add_sequence(
            SequenceRecord(
                request_id=self.request_id,
                index=index,
                tenant=self._item.tenant,
                priority=self._item.priority,
                seed=self.seed,
                finish_reason=reason,
                timings=timings,
                endpoint=self._item.endpoint,
            )
        )

    def _prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        num_top = self._sampling.prompt_logprobs or 0
        top = tuple((other, -0.5 - other) for other in range(num_top))
        scored = self.prompt_token_ids[1:]
        return (None, *(TokenLogprobs(token_id, -1.0, 2, top) for token_id in scored))

    def _logprobs(self, token_id: int) -> tuple[TokenLogprobs, ...]:
        num_top = self._sampling.logprobs
        if num_top is None:
            return ()
        top = tuple((other, -0.5 - other) for other in range(num_top))
        # the first of them is the likelier, the longer the prompt is
        size = len(self.prompt_token_ids)
        ids = self._sampling.logprob_token_ids
        top += tuple((other, -1.0 / size if other == ids[0] else -1.0) for other in ids)
        return (TokenLogprobs(token_id, -0.25, 1, top),)

    def _timings(self, num_output_tokens: int) -> SequenceTimings:
        return SequenceTimings(
            arrival_s=0.0,
            first_scheduled_s=0.0,
            first_token_s=0.25,
            finished_s=1.0,
            queue_s=0.0,
            prefill_s=0.25,
            decode_s=0.75,
            preempted_s=0.0,
            device_s=0.5,
            num_preemptions=0,
            num_prompt_tokens=len(self.prompt_token_ids),
            num_cached_tokens=self._engine.num_cached_tokens,
            num_output_tokens=num_output_tokens,
            num_blocks=1,
            cache_miss=CacheMiss.LAST_BLOCK,
            activities=(
                (Activity.QUEUE, 0.0),
                (Activity.PREFILL, 0.0),
                (Activity.DECODE, 0.25),
            ),
        )


SCORES_PAIRS = Retrieval(
    scoring=Scoring.TOKENS,
    true_token_id=121,
    false_token_id=110,
    prompts={"query": "Q: "},
    labels=("no", "yes"),  # as many as a vector has numbers
)


@dataclass(slots=True)
class FakeEngine:
    """The interface of an engine over a script."""

    script: Script = field(default_factory=Script)
    model_name: str = "fake"
    fingerprint: str = "fp_fake"
    max_model_len: int = 4096
    num_cached_tokens: int = 3
    block_size: int = 4
    num_steps: int = 0
    num_resets: int = 0
    state: EngineState = EngineState.NEW
    failure: str = ""
    now_s: float = 0.0
    last_step_s: float | None = None
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    memory_plan: MemoryPlan | None = None
    retrieval: Retrieval = field(default_factory=lambda: SCORES_PAIRS)
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    chat_template: FakeTemplate | None = field(default_factory=FakeTemplate)
    submitted: list[Submitted] = field(default_factory=list)
    open_streams: set[FakeStream] = field(default_factory=set)
    step_log: StepLog = field(default_factory=StepLog)
    refusals: list[Exception] = field(default_factory=list)
    admission: AdmissionState = field(default_factory=AdmissionState)
    loop: asyncio.AbstractEventLoop | None = None
    timings: dict[str, dict[int, SequenceTimings]] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)  # paths by name
    slots: dict[str, tuple[str, SlotPrefix]] = field(default_factory=dict)  # by filename

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(stream.request_id for stream in self.open_streams)

    async def live_timings(self, request_id: str) -> dict[int, SequenceTimings]:
        return self.timings.get(request_id, {})

    async def reset_prefix_cache(self) -> int:
        self.num_resets += 1
        return 7

    async def save_slot(
        self, filename: str, adapter: str, cache_salt: str, token_ids: Sequence[int]
    ) -> SlotPrefix:
        full = tuple(token_ids)[: len(token_ids) // self.block_size * self.block_size]
        self.slots[filename] = cache_salt, SlotPrefix(adapter, full, 10 * len(full))
        return self.slots[filename][1]

    async def restore_slot(self, filename: str, cache_salt: str) -> SlotPrefix:
        salt, prefix = self.slots.get(filename, (cache_salt, SlotPrefix("", (1, 2, 3, 4), 40)))
        assert salt == cache_salt
        return prefix

    async def start(self) -> None:
        self.state = EngineState.RUNNING
        self.loop = asyncio.get_running_loop()

    async def stop(self, drain_s: float = 0.0) -> None:
        """Waits for open streams as long as it may, as the engine does."""
        self.state = EngineState.DRAINING
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self.open_streams:
                    await asyncio.sleep(0.001)
        self.state = EngineState.STOPPED

    def stats(self) -> EngineStats:
        num_open = len(self.open_streams)
        blocks = PoolStats(
            num_free=1000 - num_open, num_cached=0, num_used=num_open, num_hits=0, num_evictions=0
        )
        return EngineStats(
            state=self.state,
            failure=self.failure,
            now_s=self.now_s,
            last_step_s=self.last_step_s,
            busy_since_s=0.0 if num_open else None,
            num_steps_in_flight=0,
            num_requests=num_open,
            scheduler=SchedulerStats(
                num_waiting=0,
                num_running=num_open,
                num_preempted=0,
                num_in_flight=0,
                blocks=blocks,
                totals=Totals(num_steps=self.num_steps),
            ),
            admission=self.admission,
        )

    @property
    def has_queue(self) -> bool:
        return self.admission.num_waiting > 0

    def check_admission(self, request: Request, num_sequences: int) -> None:
        self.admission.check(request, num_sequences, {}, waited_s=0.0)

    async def load_adapter(
        self, name: str, path: str, *, is_from_client: bool = False
    ) -> LoadedAdapter:
        """Only clients load adapters here."""
        assert is_from_client
        self.adapters[name] = path
        return LoadedAdapter(name, path, f"content of {path}", 4, 100)

    async def unload_adapter(self, name: str) -> None:
        """Any name is known."""
        self.adapters[name] = "unloaded"

    async def prepare(self, request: Request) -> None:
        """Every grammar is fine: the script follows none."""

    def stream(self, request: Request) -> FakeStream:
        if self.state is not EngineState.RUNNING:
            raise EngineError("the engine is not running")
        if self.refusals:
            raise self.refusals.pop()
        prompt, pooling = request.prompt_token_ids, request.pooling
        if not prompt:
            raise RequestError("the prompt is empty", param="prompt")
        if len(prompt) + (pooling is None) > self.max_model_len:
            raise PromptTooLong(len(prompt), self.max_model_len)
        item = Submitted(
            prompt,
            request.sampling,
            request.priority,
            request.tenant,
            request.cache_salt,
            request.timeout_s,
            pooling,
            request.request_id,
            request.endpoint,
            request.request_class,
            request.ttft_deadline_s,
            request.speculation,
            request.adapter,
            request.reports_progress,
            request.retain_s,
            request.received_s,
        )
        self.submitted.append(item)
        stream = FakeStream(self, item, f"r{len(self.submitted)}")
        self.open_streams.add(stream)
        return stream
