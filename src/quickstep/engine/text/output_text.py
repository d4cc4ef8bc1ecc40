"""One sequence's tokens to the deltas its reader sees: detokenising, then stop strings.

The scheduler ends sequences by tokens; a stop string is text, so it is found here, and the engine
then ends the sequence. Tokens are taken one at a time, so that the cut does not depend on how
many a step gave.
"""

from __future__ import annotations

from msgspec.structs import replace

from quickstep.engine.stream import Delta
from quickstep.engine.text.detokenizer import Detokenizer
from quickstep.engine.text.stop_strings import StopStrings
from quickstep.engine.text.tokenizer import Tokenizer
from quickstep.types import FinishReason, SamplingParams, SequenceOutput

__all__ = ["OutputText"]


class OutputText:
    """The growing text of one sequence, owned by the engine."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, at_text_start: bool) -> None:
        self._detokenizer = Detokenizer(
            tokenizer,
            sampling.skip_special_tokens,
            at_text_start,
            sampling.shown_special_token_ids,
        )
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output)
        self._watching = bool(sampling.stop)
        self._show_stop_token = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0

    def advance(self, output: SequenceOutput) -> Delta:
        """The delta of a scheduler's output; with finish reason STOP_STRING if its text says so.

        The caller ends the sequence at the scheduler if `output` did not.
        """
        shown = output.token_ids
        if output.stop_token_id is not None and not self._show_stop_token:
            shown = shown[:-1]
        num_taken = len(output.token_ids)
        stop: str | None = None
        if self._watching:
            text, num_watched, stop = self._watch(shown)
            num_taken = num_watched if stop is not None else num_taken
        else:
            text = self._detokenizer.feed(shown)
        self._num_tokens += len(output.token_ids)
        if output.finish_reason is not None and stop is None:
            tail, stop = self._finish()
            text += tail
        delta = Delta(
            output.index,
            text,
            output.token_ids[:num_taken],
            output.logprobs[:num_taken],
            output.finish_reason,
            _stop_reason(output),
            output.timings,
            output.error,
            output.prompt_logprobs,
            output.embedding,
        )
        if stop is None:
            return delta
        return replace(delta, finish_reason=FinishReason.STOP_STRING, stop_reason=stop)

    def _watch(self, token_ids: tuple[int, ...]) -> tuple[str, int, str | None]:
        """Text up to the first stop, how many tokens it took, and the stop."""
        text = ""
        for number, token_id in enumerate(token_ids, 1):
            may_stop = self._num_tokens + number >= self._min_tokens
            match = self._stops.feed(self._detokenizer.feed((token_id,)), may_stop)
            text += match.text
            if match.stop is not None:
                return text, number, match.stop
        return text, len(token_ids), None

    def _finish(self) -> tuple[str, str | None]:
        """The text still held, and the stop that it may turn out to complete."""
        may_stop = self._num_tokens >= self._min_tokens
        match = self._stops.feed(self._detokenizer.finish(), may_stop)
        return match.text + self._stops.finish(), match.stop


def _stop_reason(output: SequenceOutput) -> int | str | None:
    if output.finish_reason is FinishReason.DEADLINE:
        return FinishReason.DEADLINE.value
    return output.stop_token_id if output.finish_reason is FinishReason.STOP_TOKEN else None
