"""Beam search against a slow reference on the same engine, and its own promises."""

from __future__ import annotations

import pytest
from msgspec import structs
from tiny_checkpoint import write_checkpoint

from quickstep import LLM, BeamSearchParams, SamplingParams
from quickstep.engine.beam_search import BeamSearch
from quickstep.errors import EngineError, RequestError
from quickstep.types import FinishReason, Request

PROMPTS = ["the beam goes", "a", "another prompt of some length, to share blocks"]
VOCAB = 264
END = 256


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = write_checkpoint(tmp_path_factory.mktemp("beams") / "tiny")
    with LLM(str(path), num_threads=1, block_size=4) as llm:
        yield llm


def next_logprobs(llm, ids):
    """All of the vocabulary, by token id: the slow way."""
    every = SamplingParams(max_tokens=1, logprobs=VOCAB, ignore_eos=True)
    [output] = llm.generate(list(ids), every)
    [top] = output.outputs[0].logprobs
    return sorted((token_id, one.logprob) for token_id, one in top.items())


def slow_search(llm, ids, params, ends):
    """Every continuation of every beam, to the last token, without a bound."""
    width, penalty = params.beam_width, params.length_penalty
    beams, finished = [((), 0.0)], []
    for length in range(1, params.max_tokens + 1):
        grown = [
            ((*tokens, token_id), total + logprob)
            for tokens, total in beams
            for token_id, logprob in next_logprobs(llm, (*ids, *tokens))
        ]
        grown.sort(key=lambda one: -one[1])
        finished += [
            (total / length**penalty, tokens)
            for tokens, total in grown[:width]
            if tokens[-1] in ends
        ]
        finished = sorted(finished, key=lambda one: -one[0])[:width]
        beams = [one for one in grown if one[0][-1] not in ends][:width]
        if params.early_stopping and len(finished) == width:
            return finished
    finished += [(total / params.max_tokens**penalty, tokens) for tokens, total in beams]
    return sorted(finished, key=lambda one: -one[0])[:width]


@pytest.mark.parametrize("prompt", PROMPTS[:2])
@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(3, 4),
        BeamSearchParams(2, 5, length_penalty=-1.0),
        BeamSearchParams(2, 4, length_penalty=2.0, early_stopping=True),
        BeamSearchParams(3, 3, ignore_eos=True),
        BeamSearchParams(1, 4, length_penalty=0.0),
    ],
    ids=lambda one: f"{one.beam_width}-{one.length_penalty}",
)
def test_the_search_finds_what_trying_everything_finds(llm, monkeypatch, prompt, params):
    # many end tokens, so that beams do finish on a random model
    ends = frozenset(range(0, VOCAB, 5))
    monkeypatch.setattr(llm.engine.tokenizer, "_eos_token_ids", ends)
    ids = llm.engine.tokenizer.encode(prompt)
    [found] = llm.beam_search([prompt], params)
    expected = slow_search(llm, ids, params, frozenset() if params.ignore_eos else ends)
    got = [(sequence.score, sequence.output_token_ids) for sequence in found.sequences]
    assert got == expected
    for one in found.sequences:
        assert one.tokens == (*ids, *one.output_token_ids)
        assert one.text == llm.engine.tokenizer.decode(one.tokens)
        ended = one.output_token_ids[-1] in ends and not params.ignore_eos
        assert one.finish_reason == ("stop" if ended else "length")


def test_together_and_alone_give_the_same_beams_and_leave_nothing(llm):
    params = BeamSearchParams(beam_width=4, max_tokens=9)
    together = llm.beam_search(PROMPTS, params)
    assert together == [llm.beam_search(prompt, params)[0] for prompt in PROMPTS]
    assert [len(one.sequences) for one in together] == [4, 4, 4]
    stats = llm.engine.stats()
    assert (stats.num_requests, stats.scheduler.blocks.num_used) == (0, 0)


def test_beams_share_the_blocks_of_their_prompt(llm):
    before = llm.engine.step_log.totals
    llm.beam_search(PROMPTS[2], BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True))
    after = llm.engine.step_log.totals
    computed = after.num_prefill_tokens - before.num_prefill_tokens
    prompt_len = len(llm.engine.tokenizer.encode(PROMPTS[2]))
    assert computed <= prompt_len + 5 * 4 * 4  # at most a block per beam and step
    assert after.num_steps - before.num_steps <= 2 * 6


def test_the_context_ends_a_search(llm):
    params = BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True)
    [found] = llm.beam_search([[65] * 250], params)
    assert {len(sequence.tokens) for sequence in found.sequences} == {256}
    assert {sequence.finish_reason for sequence in found.sequences} == {"length"}


def test_a_deadline_ends_a_search_with_what_there_is(llm):
    now = iter(range(100))

    async def search():
        engine = llm.engine

        def submit(request):
            return engine.stream(structs.replace(request, timeout_s=None))

        beams = BeamSearch(
            submit,
            Request("", (65, 66), timeout_s=7.0),
            BeamSearchParams(beam_width=2, max_tokens=30, ignore_eos=True),
            frozenset({END}),
            max_model_len=256,
            vocab_size=VOCAB,
            clock=lambda: float(next(now)),
        )
        beams.start()
        return await beams.run()

    best = llm._thread.call(search())
    assert {one.reason for one in best} == {FinishReason.DEADLINE}
    assert 1 <= len(best[0].token_ids) < 30


def test_a_failing_engine_fails_the_search(llm):
    async def search():
        engine = llm.engine

        def submit(request):
            stream = engine.stream(request)
            if len(request.prompt_token_ids) > 2:
                engine.abort(stream.request_id)
            return stream

        params = BeamSearchParams(beam_width=2, max_tokens=3)
        beams = BeamSearch(
            submit, Request("", (65, 66)), params, frozenset(), max_model_len=256, vocab_size=VOCAB
        )
        beams.start()
        try:
            await beams.run()
        finally:
            await beams.aclose()

    with pytest.raises(EngineError, match="without a token"):
        llm._thread.call(search())
    assert llm.engine.stats().num_requests == 0


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 0.7}, "temperature"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 11.0}, "length_penalty"),
    ],
)
def test_values_that_mean_nothing_are_refused(values, param):
    with pytest.raises(RequestError) as refused:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **values})
    assert refused.value.param == param
