"""A sequence's deltas do not depend on how its tokens came: one a step, or several at once."""

from __future__ import annotations

from itertools import pairwise

from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scripted_engine import END_ID, byte_tokenizer

from quickstep.text.output_text import OutputText, ReasoningPassage
from quickstep.text.tool_calls.formats import REASONING_FORMATS
from quickstep.types import FinishReason, SamplingParams, SequenceOutput, TokenLogprobs

TOKENIZER = byte_tokenizer()
LETTERS = [*b"ab", *"é".encode(), END_ID]


def deliver(groups, sampling, stopped, in_reasoning=False):
    """(text, tokens, finish reason, stop reason) of tokens that come in `groups`."""
    text = OutputText(TOKENIZER, sampling, at_text_start=False, in_reasoning=in_reasoning)
    shown, tokens, logprobs = "", (), ()
    for number, group in enumerate(groups, 1):
        ends = number == len(groups)
        reason = FinishReason.STOP_TOKEN if stopped else FinishReason.MAX_TOKENS
        delta = text.advance(
            SequenceOutput(
                "r",
                0,
                tuple(group),
                tuple(TokenLogprobs(token_id, -1.0, 1) for token_id in group),
                finish_reason=reason if ends else None,
                stop_token_id=group[-1] if ends and stopped and group else None,
            )
        )
        shown += delta.text
        tokens += delta.token_ids
        logprobs += delta.logprobs
        if delta.finish_reason is not None:
            break
    assert [logprob.token_id for logprob in logprobs] == list(tokens)
    return shown, tokens, delta.finish_reason, delta.stop_reason


@examples(100)
@given(
    tokens=st.lists(st.sampled_from(LETTERS), min_size=1, max_size=10),
    cuts=st.sets(st.integers(1, 9)),
    stops=st.lists(st.text("abé", min_size=1, max_size=3), max_size=2),
    include=st.booleans(),
    skip=st.booleans(),
    stopped=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_groups_of_tokens_give_what_single_tokens_give(
    tokens, cuts, stops, include, skip, stopped, min_tokens
):
    sampling = SamplingParams(
        stop=stops,
        include_stop_str_in_output=include,
        skip_special_tokens=skip,
        min_tokens=min_tokens,
    )
    edges = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    groups = [tokens[a:b] for a, b in pairwise(edges)]
    single = [[token_id] for token_id in tokens]
    assert deliver(groups, sampling, stopped) == deliver(single, sampling, stopped)


@given(cuts=st.sets(st.integers(1, 7)), min_tokens=st.integers(0, 8))
def test_a_stop_counts_from_the_token_with_which_there_are_enough(cuts, min_tokens):
    """One that is complete before is plain text, however the tokens come."""
    sampling = SamplingParams(stop=("a",), min_tokens=min_tokens, max_tokens=8)
    places = [0, *sorted(cuts), 8]
    groups = [tuple(b"babbabab"[start:end]) for start, end in pairwise(places)]
    shown, tokens, reason, stop = deliver(groups, sampling, stopped=False)
    end = next((at for at in (1, 4, 6) if at + 1 >= min_tokens), None)
    if end is None:
        assert (shown, reason, stop) == ("babbabab", FinishReason.MAX_TOKENS, None)
    else:
        assert (shown, reason, stop) == ("babbabab"[:end], FinishReason.STOP_STRING, "a")
        assert len(tokens) == end + 1


@examples(80)
@given(tokens=st.lists(st.sampled_from(LETTERS), min_size=1, max_size=10))
def test_without_stops_the_text_is_the_whole_decode(tokens):
    text, taken, reason, _ = deliver([[token] for token in tokens], SamplingParams(), stopped=False)
    assert text == TOKENIZER.decode(tokens)
    assert taken == tuple(tokens)
    assert reason is FinishReason.MAX_TOKENS


MARKERS = ("<a", "b>")
PIECES = st.lists(st.sampled_from(["<a", "<", "a", "b", "b>", ">", " ", "é", "c"]), max_size=8)


def in_two(text, in_reasoning):
    """The reasoning of a complete text with its markers, and the rest."""
    begun = text if in_reasoning else text.lstrip()
    opening = "" if in_reasoning else MARKERS[0]
    if not begun.startswith(opening):
        return "", text
    num_before = len(text) - len(begun) + len(opening)
    start = text.find(MARKERS[1], num_before)
    end = len(text) if start < 0 else start + len(MARKERS[1])
    return text[:end], text[end:]


@examples(100)
@given(
    pieces=PIECES,
    stops=st.lists(st.text("ab<>é ", min_size=1, max_size=3), min_size=1, max_size=2),
    include=st.booleans(),
    in_reasoning=st.booleans(),
)
def test_stops_are_looked_for_in_the_text_after_the_reasoning(pieces, stops, include, in_reasoning):
    complete = "".join(pieces)
    reasoning, rest = in_two(complete, in_reasoning)
    after = SamplingParams(stop=stops, include_stop_str_in_output=include)
    sampling = replace(after, stop_after_reasoning=MARKERS)
    groups = [[byte] for byte in complete.encode()] or [[]]
    shown, _, reason, stop = deliver(groups, sampling, False, in_reasoning)
    expected, _, reason_of_rest, stop_of_rest = deliver(
        [[byte] for byte in rest.encode()] or [[]], after, False
    )
    assert (shown, reason, stop) == (reasoning + expected, reason_of_rest, stop_of_rest)
    in_groups = [list(complete.encode())]
    assert deliver(in_groups, sampling, False, in_reasoning)[0] == shown


def test_reasoning_is_shown_as_it_comes_whatever_the_stops_are():
    passage = ReasoningPassage(("<think>", "</think>"), in_reasoning=False)
    fed = [passage.feed(text) for text in ("\n<thi", "nk>", "a</th", "ink>b", "c")]
    assert fed == [("", ""), ("\n<think>", ""), ("a</th", ""), ("ink>", "b"), ("", "c")]


def test_a_text_that_only_begins_like_an_opening_is_looked_through():
    passage = ReasoningPassage(("<think>", "</think>"), in_reasoning=False)
    assert [passage.feed("<thin"), passage.feed(" ice")] == [("", ""), ("", "<thin ice")]
    ended = ReasoningPassage(("<think>", "</think>"), in_reasoning=False)
    assert (ended.feed(" <th"), ended.finish()) == (("", ""), " <th")


def test_the_reasoning_of_harmony_ends_at_the_final_channel():
    passage = ReasoningPassage(REASONING_FORMATS["harmony"].passage, in_reasoning=False)
    thought = "<|channel|>analysis<|message|>We <|message|> final.<|end|><|start|>assistant"
    header = "<|channel|>final <|constrain|>json<|message|>"
    assert passage.feed(f"{thought}{header}" + "{}") == (f"{thought}{header}", "{}")


def test_an_end_without_tokens_brings_the_held_text():
    text = OutputText(TOKENIZER, SamplingParams(stop=("abc",)), at_text_start=False)
    assert text.advance(SequenceOutput("r", 0, tuple(b"xab"))).text == "x"
    ended = text.advance(SequenceOutput("r", 0, finish_reason=FinishReason.ABORTED))
    assert (ended.text, ended.finish_reason) == ("ab", FinishReason.ABORTED)
