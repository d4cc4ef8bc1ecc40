"""A sequence's deltas do not depend on how its tokens came: one a step, or several at once."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import END_ID, byte_tokenizer

from quickstep.engine.text.output_text import OutputText
from quickstep.types import FinishReason, SamplingParams, SequenceOutput, TokenLogprobs

TOKENIZER = byte_tokenizer()
LETTERS = [*b"ab", *"é".encode(), END_ID]


def deliver(groups, sampling, stopped):
    """(text, tokens, finish reason, stop reason) of tokens that come in `groups`."""
    text = OutputText(TOKENIZER, sampling, at_text_start=False)
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


@settings(max_examples=500, deadline=None)
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


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.sampled_from(LETTERS), min_size=1, max_size=10))
def test_without_stops_the_text_is_the_whole_decode(tokens):
    text, taken, reason, _ = deliver([[token] for token in tokens], SamplingParams(), stopped=False)
    assert text == TOKENIZER.decode(tokens)
    assert taken == tuple(tokens)
    assert reason is FinishReason.MAX_TOKENS


def test_an_end_without_tokens_brings_the_held_text():
    text = OutputText(TOKENIZER, SamplingParams(stop=("abc",)), at_text_start=False)
    assert text.advance(SequenceOutput("r", 0, tuple(b"xab"))).text == "x"
    ended = text.advance(SequenceOutput("r", 0, finish_reason=FinishReason.ABORTED))
    assert (ended.text, ended.finish_reason) == ("ab", FinishReason.ABORTED)
