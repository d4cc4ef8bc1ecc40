"""One sequence's tokens to the deltas of its request: detokenizing, then stop strings.

    token ids -> Detokenizer -> text -> StopStrings -> text that no stop string can cut -> Delta
                                  |                                                        ^
                            ReasoningPassage -> reasoning, which is not searched ----------|

The scheduler ends sequences by tokens; a stop string is text, so it is found here, and the engine
then ends the sequence. Tokens are processed one at a time, so that the cut does not depend on how
many of them a step returned. Each sequence has one `OutputText`, owned by the engine.
"""

from __future__ import annotations

import codecs
import enum
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec.structs import replace

from quickstep.text.tokenizer import DecoderKind, Tokenizer
from quickstep.types import Delta, FinishReason, SamplingParams, SequenceOutput

_PROMPT_END = 32  # last tokens of a prompt, in which the opening tag of the reasoning may be
_SPACE = " \t\n\r"


class OutputText:
    """The growing text of one sequence. `in_reasoning`: the prompt has opened the reasoning."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        at_text_start: bool,
        in_reasoning: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer,
            sampling.skip_special_tokens,
            at_text_start,
            sampling.shown_special_token_ids,
        )
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output)
        self._has_stops = bool(sampling.stop)
        self._reasoning = ReasoningPassage(sampling.stop_after_reasoning, in_reasoning)
        self._keeps_stop_token = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0

    def advance(self, output: SequenceOutput) -> Delta:
        """The delta of a scheduler's output; its finish reason is STOP_STRING if a stop completes.

        The caller then ends the sequence at the scheduler, unless `output` has ended it.
        """
        text_ids = output.token_ids
        if output.stop_token_id is not None and not self._keeps_stop_token:
            text_ids = text_ids[:-1]
        num_tokens = len(output.token_ids)  # of the delta
        stop: str | None = None
        if self._has_stops:
            text, num_read, stop = self._up_to_stop(text_ids)
            num_tokens = num_read if stop is not None else num_tokens
        else:
            text = self._detokenizer.feed(text_ids)
        self._num_tokens += len(output.token_ids)
        if output.finish_reason is not None and stop is None:
            tail, stop = self._finish()
            text += tail
        delta = Delta(
            output.index,
            text,
            output.token_ids[:num_tokens],
            output.logprobs[:num_tokens],
            output.finish_reason,
            None if output.finish_reason is None else _stop_reason(output),
            output.timings,
            output.error,
            output.prompt_logprobs,
            output.embedding,
            output.progress,
        )
        if stop is None:
            return delta
        return replace(delta, finish_reason=FinishReason.STOP_STRING, stop_reason=stop)

    def _up_to_stop(self, token_ids: tuple[int, ...]) -> tuple[str, int, str | None]:
        """The text up to the first stop, how many tokens it has, and the stop."""
        text = ""
        for number, token_id in enumerate(token_ids, 1):
            may_stop = self._num_tokens + number >= self._min_tokens
            reasoning, rest = self._reasoning.feed(self._detokenizer.feed((token_id,)))
            match = self._stops.feed(rest, may_stop)
            text += reasoning + match.text
            if match.stop is not None:
                return text, number, match.stop
        return text, len(token_ids), None

    def _finish(self) -> tuple[str, str | None]:
        """The text that was held back, and the stop that it may complete."""
        may_stop = self._num_tokens >= self._min_tokens
        reasoning, rest = self._reasoning.feed(self._detokenizer.finish())
        match = self._stops.feed(rest + self._reasoning.finish(), may_stop)
        return reasoning + match.text + self._stops.finish(), match.stop


def _stop_reason(output: SequenceOutput) -> int | str | None:
    if output.finish_reason is FinishReason.DEADLINE:
        return FinishReason.DEADLINE.value
    if output.finish_reason is FinishReason.REPETITION:
        return "repetition_detected"  # vLLM's
    return output.stop_token_id if output.finish_reason is FinishReason.STOP_TOKEN else None


class Detokenizer:
    """Token ids to text, one step at a time, exactly as decoding the complete sequence would.

    The texts that `feed` and `finish` return, joined, equal `Tokenizer.decode` of the tokens. None
    of them ends inside a code point: an incomplete one is held back until its last byte arrives,
    and becomes U+FFFD only where `decode` returns it. The prompt is not read, so its text cannot
    leak into the output (the library's `DecodeStream(ids=prompt)` can). Time is linear in the text.

    `at_text_start` says that no text precedes the first token: some vocabularies (SentencePiece)
    drop the space of a text's first word, which a continuation must keep. `kept_special` are
    special tokens that are not skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        at_text_start: bool = False,
        kept_special: Iterable[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._skipped = skipped - frozenset(kept_special)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_bytes = tokenizer.kind is DecoderKind.BYTES
        self._at_start = at_text_start
        self._byte_run: list[str] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens. Returns the text that is complete now, which may be empty."""
        text_ids = token_ids
        if not self._skipped.isdisjoint(token_ids):
            text_ids = [token_id for token_id in token_ids if token_id not in self._skipped]
        if self._in_bytes:
            added = b"".join(map(self._tokenizer.token_bytes, text_ids))
            # The library's incremental decoder is written in Python: most tokens do not need it.
            is_ascii = added.isascii() and not self._utf8.getstate()[0]
            return added.decode("ascii") if is_ascii else self._utf8.decode(added)
        return "".join(map(self._feed_piece, text_ids))

    def finish(self) -> str:
        """No token follows. Returns the text that was held back."""
        if self._in_bytes:
            return self._utf8.decode(b"", final=True)
        return self._end_byte_run()

    def _feed_piece(self, token_id: int) -> str:
        """A run of fallback bytes is decoded at once: one bad byte makes all of it U+FFFD."""
        piece = self._tokenizer.piece(token_id)
        if piece is None:
            return ""
        if self._tokenizer.is_byte_piece(piece):
            self._byte_run.append(piece)
            return ""
        before = self._end_byte_run()
        if not self._at_start:
            return before + self._tokenizer.token_bytes(token_id).decode()
        self._at_start = False
        return before + self._tokenizer.decode_pieces((piece,), at_start=True)

    def _end_byte_run(self) -> str:
        if not self._byte_run:
            return ""
        text = self._tokenizer.decode_pieces(self._byte_run, at_start=self._at_start)
        self._byte_run.clear()
        self._at_start = False
        return text


class _Place(enum.Enum):
    """Where the next character of a text is."""

    UNDECIDED = "undecided"
    INSIDE = "inside"
    AFTER = "after"


class ReasoningPassage:
    """The reasoning at the beginning of a text that arrives in pieces.

    `markers` are a text that opens it and those that close it, one after the other; none for texts
    without reasoning. White space may precede the opening. The beginning is held back until it is
    decided whether it opens the reasoning, and nothing after it.
    """

    def __init__(self, markers: Sequence[str], in_reasoning: bool) -> None:
        self._opening = markers[0] if markers else ""
        self._closings = list(markers[1:])
        self._held = ""  # of the undecided beginning, or the last characters inside
        self._place = _Place.INSIDE if in_reasoning else _Place.UNDECIDED
        if not markers:
            self._place = _Place.AFTER

    def feed(self, text: str) -> tuple[str, str]:
        """Add `text`. Returns the reasoning in it, markers included, and what follows that."""
        if self._place is _Place.AFTER:
            return "", text
        if self._place is _Place.INSIDE:
            return self._up_to_closing(text)
        pending = self._held + text
        begun = pending.lstrip(_SPACE)
        if begun.startswith(self._opening):
            self._place, self._held = _Place.INSIDE, ""
            inside = begun.removeprefix(self._opening)
            reasoning, rest = self._up_to_closing(inside)
            return pending.removesuffix(inside) + reasoning, rest
        if self._opening.startswith(begun):
            self._held = pending
            return "", ""
        self._place, self._held = _Place.AFTER, ""
        return "", pending

    def finish(self) -> str:
        """No text follows. Returns the text that was held back."""
        held = self._held if self._place is _Place.UNDECIDED else ""
        self._place, self._held = _Place.AFTER, ""
        return held

    def _up_to_closing(self, text: str) -> tuple[str, str]:
        seen, num_passed = self._held + text, 0
        while self._closings:
            closing = self._closings[0]
            start = seen.find(closing, num_passed)
            if start < 0:
                self._held = seen[max(num_passed, len(seen) - len(closing) + 1) :]
                return text, ""
            num_passed = start + len(closing)
            del self._closings[0]
        self._place = _Place.AFTER
        rest = seen[num_passed:]
        return text.removesuffix(rest), rest


def prompt_end(decode: Callable[[Sequence[int], bool], str], prompt: Sequence[int]) -> str:
    """The end of a prompt's text, special tokens included, without white space after it: the
    opening of the reasoning may be there. `decode` is the tokenizer's.
    """
    return decode(prompt[-_PROMPT_END:], False).rstrip()


class StopMatch(msgspec.Struct, frozen=True):
    """The text that no stop can cut any more, and the stop that ended the text, if any."""

    text: str
    stop: str | None = None


class StopStrings:
    """Finds stop strings in a text that arrives in pieces, and returns no part of one.

    The text is cut at the first stop that completes in it; of several completing at the same
    character, at the one that began earliest; of equal ones, at the first listed. The result does
    not depend on how the text was split. Text that may be the beginning of a stop is held back
    until that is decided.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_in_output = include_in_output
        self._held = ""

    def feed(self, text: str, may_stop: bool = True) -> StopMatch:
        """Add `text`; with `may_stop` False a stop that completes in it is plain text.

        A match ends the text: everything after the stop is dropped.
        """
        num_seen = len(self._held)
        pending = self._held + text
        if may_stop and text:
            found = self._first_match(pending, num_seen)
            if found is not None:
                start, stop = found
                self._held = ""
                end = start + len(stop) if self._include_in_output else start
                return StopMatch(pending[:end], stop)
        keep = self._num_undecided(pending)
        self._held = pending[len(pending) - keep :]
        return StopMatch(pending[: len(pending) - keep])

    def finish(self) -> str:
        """No text follows. Returns the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, pending: str, num_seen: int) -> tuple[int, str] | None:
        """The start and the stop of the match that ends first after `num_seen` characters."""
        best: tuple[int, int, int] | None = None
        for order, stop in enumerate(self._stops):
            start = pending.find(stop, max(0, num_seen - len(stop) + 1))
            if start >= 0:
                match = (start + len(stop), start, order)
                best = match if best is None else min(best, match)
        return None if best is None else (best[1], self._stops[best[2]])

    def _num_undecided(self, pending: str) -> int:
        """Length of the longest end of `pending` that begins a stop without completing it."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(pending)), longest, -1):
                if pending.endswith(stop[:length]):
                    longest = length
                    break
        return longest
