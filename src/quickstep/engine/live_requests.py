"""The requests that have not ended: their texts, their sinks, and their records in the step log.

Owned by the engine, called in its event loop only. It turns outputs of the scheduler into deltas
and puts them into the sinks. If a text completes a stop string, it ends the sequence at the
scheduler; if a delivery fails, it ends the request, without an effect on others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from quickstep.engine.records.step_log import SequenceRecord, StepLog
from quickstep.engine.stream import Sink
from quickstep.errors import ResumedAfterEnd
from quickstep.text.grammar.grammars import CompiledGrammar
from quickstep.text.output_text import OutputText, prompt_end
from quickstep.text.tokenizer import Tokenizer
from quickstep.types import (
    Delta,
    FinishReason,
    Request,
    Resumed,
    SequenceOutput,
    SequenceTimings,
)

_LOGGER = logging.getLogger(__name__)

# (request id, sequence index or None for all, reason, now): ends them, returns their last outputs
EndSequences = Callable[[str, int | None, FinishReason, float], Iterable[SequenceOutput]]


class _LiveRequest:
    """One request; `texts` holds the sequences that have not ended.

    It holds `grammar` for the runner, which looks it up at each admission.
    """

    def __init__(
        self,
        request: Request,
        sink: Sink,
        texts: dict[int, OutputText],
        grammar: CompiledGrammar | None,
    ) -> None:
        self.request = request
        self.sink = sink
        self.grammar = grammar
        self.texts = texts
        self.logged: set[int] = set()  # ended sequences in the step log


class LiveRequests:
    """An engine's live requests, by id."""

    def __init__(
        self, tokenizer: Tokenizer, step_log: StepLog, end_sequences: EndSequences
    ) -> None:
        self._tokenizer = tokenizer
        self._step_log = step_log
        self._end_sequences = end_sequences
        self._live: dict[str, _LiveRequest] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._live

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of live requests, in the order of submission."""
        return tuple(self._live)

    async def wait_until_empty(self) -> None:
        """Return once no request is live."""
        await self._empty.wait()

    def accept(self, request: Request, sink: Sink, grammar: CompiledGrammar | None) -> None:
        """Add a request that the scheduler accepted; hold its grammar until its end.

        Raises:
            ResumedAfterEnd: The text of a sequence has ended with a stop string.
        """
        sampling, prompt = request.sampling, request.prompt_token_ids
        at_start = sampling.skip_special_tokens and all(map(self._tokenizer.is_special, prompt))
        opened = self._opens_reasoning(request)
        texts = {
            index: OutputText(self._tokenizer, sampling, at_start, opened)
            for index in request.indices
        }
        for resumed in request.resumed:
            if resumed.index in texts:
                _read_again(texts[resumed.index], resumed)
        self._live[request.request_id] = _LiveRequest(request, sink, texts, grammar)
        self._empty.clear()

    def _opens_reasoning(self, request: Request) -> bool:
        """Whether the output begins in the reasoning, as far as that matters for stop strings."""
        sampling, prompt = request.sampling, request.prompt_token_ids
        markers = sampling.stop_after_reasoning
        if not (sampling.stop and markers):
            return False
        return sampling.inside_reasoning or prompt_end(self._tokenizer.decode, prompt).endswith(
            markers[0]
        )

    def deliver(self, outputs: Iterable[SequenceOutput], now: float) -> None:
        """Put the scheduler's outputs, as deltas, into their sinks: a delta per token, so that a
        stream does not depend on the drafts that were accepted.
        """
        for output in outputs:
            parts = ((0, output),) if len(output.token_ids) <= 1 else _one_token_each(output)
            for num_after, part in parts:
                live = self._live.get(output.request_id)
                if live is None or output.index not in live.texts:
                    break
                try:
                    self._deliver_one(live, part, now, output.timings, num_after)
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # one request's end; a panic in Rust is no Exception
                    self._fail(live, output, error, now)

    def fail_all(self, why: str) -> None:
        """End every request with ERROR, without the scheduler: the engine has failed."""
        for live in self._live.values():
            for index in live.texts:
                try:
                    reason = FinishReason.ERROR
                    live.sink.put(Delta(index, finish_reason=reason, error=why, is_lost=True))
                except Exception:  # the engine has failed: end the other requests in any case
                    _LOGGER.exception("%s could not be ended", live.request.request_id)
        self._live.clear()
        self._empty.set()

    def _deliver_one(
        self,
        live: _LiveRequest,
        output: SequenceOutput,
        now: float,
        timings: SequenceTimings | None,
        num_after: int,
    ) -> None:
        """Deliver a token. `timings` are those of a sequence that has ended, maybe after it;
        `num_after` tokens were generated in the same step after it.
        """
        delta = live.texts[output.index].advance(output)
        if num_after:
            delta = replace(delta, is_draft=True)
        reason = delta.finish_reason
        if reason is None:
            if live.request.handover is not None:
                delta = replace(delta, timings=timings)
            live.sink.put(delta)
            return
        if output.finish_reason is None:
            ended = self._end_sequences(
                output.request_id, output.index, FinishReason.STOP_STRING, now
            )
            timings = next((end.timings for end in ended if end.timings is not None), timings)
            if timings is not None:
                num_tokens = timings.num_output_tokens - num_after
                timings = replace(timings, num_output_tokens=num_tokens)
            delta = replace(delta, timings=timings)
        self._finish(live, delta, reason)

    def _fail(
        self, live: _LiveRequest, output: SequenceOutput, error: BaseException, now: float
    ) -> None:
        """End all sequences of a request, whose texts may be in an invalid state."""
        request_id, reason = live.request.request_id, FinishReason.ERROR
        _LOGGER.error("%s could not be delivered", request_id, exc_info=error)
        ended = self._end_sequences(request_id, None, reason, now)
        timings = {sequence.index: sequence.timings for sequence in (output, *ended)}
        why = f"the answer could not be delivered: {error}"
        for index in tuple(live.texts):
            delta = Delta(index, finish_reason=reason, timings=timings.get(index), error=why)
            try:
                self._finish(live, delta, reason)
            except Exception:  # its sink fails again; the other sequences continue
                _LOGGER.exception("%s could not be ended", request_id)
        self._remove(live)

    def _finish(self, live: _LiveRequest, delta: Delta, reason: FinishReason) -> None:
        request = live.request
        if delta.timings is not None and delta.index not in live.logged:
            live.logged.add(delta.index)
            record = SequenceRecord(
                request_id=request.request_id,
                index=delta.index,
                tenant=request.tenant,
                priority=request.priority,
                seed=request.seed,
                finish_reason=reason,
                timings=delta.timings,
                adapter=request.adapter,
                endpoint=request.endpoint,
                is_continuation=request.is_continuation,
            )
            self._step_log.add_sequence(record)
        live.sink.put(delta)
        del live.texts[delta.index]
        if not live.texts:
            self._remove(live)

    def _remove(self, live: _LiveRequest) -> None:
        self._live.pop(live.request.request_id, None)
        if not self._live:
            self._empty.set()


def _read_again(text: OutputText, resumed: Resumed) -> None:
    """Bring a text to where the client has it: what these tokens give was delivered."""
    for number, token_id in enumerate(resumed.token_ids, 1):
        delta = text.advance(SequenceOutput("", resumed.index, (token_id,)))
        if delta.finish_reason is not None:
            how = f"stop {delta.stop_reason!r}"
            raise ResumedAfterEnd(resumed.index, len(resumed.token_ids), number, how)


def _one_token_each(output: SequenceOutput) -> Iterator[tuple[int, SequenceOutput]]:
    """The output of several tokens in parts of one, with how many tokens come after each. What
    belongs to the prompt is in the first part, the end is in the last one.
    """
    num_tokens = len(output.token_ids)
    for index in range(num_tokens - 1):
        yield (
            num_tokens - 1 - index,
            SequenceOutput(
                output.request_id,
                output.index,
                output.token_ids[index : index + 1],
                output.logprobs[index : index + 1],
                prompt_logprobs=() if index else output.prompt_logprobs,
                progress=None if index else output.progress,
            ),
        )
    last = replace(
        output,
        token_ids=output.token_ids[-1:],
        logprobs=output.logprobs[-1:],
        prompt_logprobs=(),
        progress=None,
    )
    yield 0, last
