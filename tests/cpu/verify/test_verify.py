"""The exactness checker passes a sound engine and finds what is planted in an unsound one."""

import itertools
from typing import get_args

import numpy as np
import pytest
import torch
from msgspec.structs import fields
from paged_hash_model import PagedHashModel

from quickstep.config import CacheConfig
from quickstep.errors import ConfigError, EngineError
from quickstep.runtime import slots
from quickstep.runtime.pooling import Pool
from quickstep.runtime.sampling import sampler
from quickstep.runtime.sampling.noise import noise_bits
from quickstep.runtime.sampling.penalties import Penalties
from quickstep.runtime.sampling.prompt_scores import PromptScorer
from quickstep.runtime.sampling.state import SamplingState
from quickstep.sampling_params import GrammarKind
from quickstep.types import Pooling, SamplingParams
from quickstep.verify import run
from quickstep.verify.checker import SCENARIOS, verify
from quickstep.verify.report import VerifyOptions
from quickstep.verify.requests import (
    MAX_OUTPUTS,
    MAX_PROMPT_LEN,
    RequestVocabulary,
    random_requests,
)

EOS = frozenset({3})
OPTIONS = VerifyOptions(num_requests=100, threads=(1,), rounds=2)
FAIL_FAST = VerifyOptions(num_requests=80, threads=(1,), rounds=2, fail_fast=True)


def verified(model, options=OPTIONS):
    return verify(lambda threads: model, options, EOS)


def test_a_sound_engine_has_no_mismatch_and_every_scenario_happens():
    report = verified(PagedHashModel(), VerifyOptions(num_requests=300, seed=2, threads=(1, 2)))
    assert report.first_mismatch is None
    assert report.mismatches == 0
    assert report.comparisons > 2 * 300
    runs = {name: counts.runs for name, counts in report.scenarios.items()}
    assert {one.name for one in SCENARIOS if not one.has_loads} <= set(runs)
    assert runs["chunked"].chunked_rows > 50
    assert runs["prefix hits"].prefix_hit_tokens > 100
    assert runs["preempted"].preemptions > 0
    assert runs["aborts"].aborts > 0
    assert runs["paused"].pauses > 5
    assert runs["overlapped"].overlapped_steps > 50
    assert sum(run.beam_searches for run in runs.values()) > 10
    for name in ("drafts", "drafts, starved", "all with drafts", "trees", "all with trees"):
        assert runs[name].accepted_drafts > 20
        assert runs[name].drafts > runs[name].accepted_drafts
    assert runs["drafts, starved"].preemptions > 0
    assert min(runs["suffix"].drafts, runs["ngram"].drafts) > 0
    assert sum(run.repetitions for run in runs.values()) > 50
    assert runs["stored"].restored_blocks > 20
    assert runs["stored, starved"].restored_blocks > 20
    everything = runs["all together"]
    assert min(everything.chunked_rows, everything.preemptions, everything.aborts) > 0
    assert min(everything.overlapped_steps, everything.mixed_steps, everything.pauses) > 0


def test_the_report_is_a_function_of_the_seed():
    small = VerifyOptions(num_requests=20, seed=5, threads=(1,))
    first = verified(PagedHashModel(), small).to_json()
    assert verified(PagedHashModel(), small).to_json() == first
    other = VerifyOptions(num_requests=20, seed=6, threads=(1,))
    assert verified(PagedHashModel(), other).to_json() != first


class DependsOnBatchSize(PagedHashModel):
    def logits(self, hidden, lora=None):
        return super().logits(hidden) * (1.0 + 1e-7 * (len(hidden) > 1))


class DependsOnPlaceInBatch(PagedHashModel):
    def logits(self, hidden, lora=None):
        return super().logits(hidden) + 1e-6 * torch.arange(len(hidden))[:, None]


class DependsOnChunks(PagedHashModel):
    def every_token(self, batch, kv):
        hidden = super().every_token(batch, kv)
        counts = np.diff(batch.layout.row_offsets)
        for row, (context, count) in enumerate(zip(batch.layout.context_lens, counts, strict=True)):
            if 1 < count < context:
                hidden[batch.layout.row_offsets[row + 1] - 1] *= 1.0 + 2e-7
        return hidden


class ForgetsToReadSharedBlocks(PagedHashModel):
    """A row that starts after a cached prefix sees its first block as zeros."""

    def every_token(self, batch, kv):
        hidden = super().every_token(batch, kv)
        layout = batch.layout
        first = kv.keys[0][layout.block_tables[:, 0].long()].sum(dim=(1, 2))
        for row, context in enumerate(layout.context_lens):
            begin, end = layout.row_offsets[row], layout.row_offsets[row + 1]
            if context - (end - begin) == 16 and end - begin > 1:
                hidden[begin:end] -= first[row]
        return hidden


@pytest.mark.parametrize(
    "model",
    [DependsOnBatchSize, DependsOnPlaceInBatch, DependsOnChunks, ForgetsToReadSharedBlocks],
)
def test_a_model_whose_rows_notice_their_batch_is_caught(model):
    report = verified(model(), FAIL_FAST)
    assert report.mismatches > 0
    found = report.first_mismatch
    assert (found.expected_token, found.expected_logprobs) != (
        found.got_token,
        found.got_logprobs,
    )


def test_noise_that_depends_on_the_order_of_samples_is_caught(monkeypatch):
    calls = itertools.count()
    monkeypatch.setattr(
        sampler, "noise_bits", lambda seed, position, ids: noise_bits(next(calls), position, ids)
    )
    assert verified(PagedHashModel(), FAIL_FAST).mismatches > 0


def test_penalties_lost_in_preemption_are_caught(monkeypatch):
    class Forgetful(SamplingState):
        def __init__(self, admission, vocab_size, new_matcher=None):
            super().__init__(admission, vocab_size, new_matcher)
            self.penalties = Penalties(admission.sampling, admission.token_ids, ())

    monkeypatch.setattr(slots, "SamplingState", Forgetful)
    report = verified(PagedHashModel(), VerifyOptions(num_requests=100, threads=(1,), rounds=2))
    assert report.mismatches > 0
    by_name = report.scenarios
    assert by_name["preempted"].mismatches > 0
    assert all(not one.mismatches or one.runs.preemptions for one in by_name.values())


def test_an_overlapped_step_that_reads_a_stale_token_is_caught(monkeypatch):
    def stale(slot, row):
        return row.token_ids or (0,) * row.num_tokens

    monkeypatch.setattr(slots.Slot, "input_tokens", stale)
    report = verified(PagedHashModel(), VerifyOptions(num_requests=40, threads=(1,), rounds=2))
    overlapping = {"overlapped", "paused", "all together", "all with drafts", "all with trees"}
    overlapping.add("stored, starved")
    assert {name for name, counts in report.scenarios.items() if counts.mismatches} == overlapping


def test_stored_blocks_that_come_back_with_other_content_are_caught(monkeypatch):
    monkeypatch.setattr(run._Run, "_write_block", lambda *_: None)
    report = verified(PagedHashModel(), VerifyOptions(num_requests=60, threads=(1,), rounds=2))
    mismatched = {name for name, counts in report.scenarios.items() if counts.mismatches}
    assert mismatched == {"stored", "stored, starved"}


def test_a_mean_that_depends_on_chunks_is_caught(monkeypatch):
    whole = Pool.add

    def in_halves(pool, hidden):
        """Adds each chunk by itself first: the order of additions follows the chunks."""
        before, pool._sum = pool._sum, None
        whole(pool, hidden)
        if before is not None:
            pool._sum = before + pool._sum

    monkeypatch.setattr(Pool, "add", in_halves)
    options = VerifyOptions(num_requests=100, threads=(1,), rounds=3, fail_fast=True)
    assert verified(PagedHashModel(), options).mismatches > 0


def test_scores_that_read_the_row_beside_are_caught(monkeypatch):
    whole = PromptScorer.score

    def shifted(scorer, hidden, row, slot):
        """The chunk's last position is scored with the first one's logits."""
        scores = whole(scorer, hidden, row, slot)
        return (*scores[:-1], scores[0]) if len(scores) > 1 else scores

    monkeypatch.setattr(PromptScorer, "score", shifted)
    assert verified(PagedHashModel(), FAIL_FAST).mismatches > 0


class GivesNaN(PagedHashModel):
    def logits(self, hidden, lora=None):
        return super().logits(hidden) * float("nan")


def test_to_fail_fast_is_to_compare_no_more_groups_than_needed():
    whole = VerifyOptions(num_requests=24, threads=(1,))
    options = (whole, VerifyOptions(num_requests=24, threads=(1,), fail_fast=True))
    slow, fast = (verified(DependsOnBatchSize(), option) for option in options)
    assert 0 < fast.comparisons < slow.comparisons
    assert fast.first_mismatch == slow.first_mismatch


def test_a_request_that_fails_even_alone_is_an_error_not_a_match():
    with pytest.raises(EngineError, match="fails at batch size 1"):
        verified(GivesNaN())


def test_the_thread_count_is_put_back():
    before = torch.get_num_threads()
    verified(PagedHashModel(), VerifyOptions(num_requests=2, threads=(1, 2), rounds=2))
    assert torch.get_num_threads() == before


def test_requests_are_at_block_edges_share_prefixes_and_fit():
    block_size, max_model_len = 16, 60
    found = random_requests(400, 0, RequestVocabulary(50, EOS), block_size, max_model_len)
    requests = [one.request for one in found]
    lengths = [len(request.prompt_token_ids) for request in requests]
    assert max(lengths) < max_model_len <= MAX_PROMPT_LEN
    assert {15, 16, 17, 31, 32, 33, 47, 48, 49} <= set(lengths)
    firsts = {request.prompt_token_ids[:block_size] for request in requests}
    assert len(firsts) < len(requests) * 0.6
    assert {request.sampling.temperature for request in requests} == {0.0, 0.8, 1.3}
    assert all(request.sampling.logprobs is not None for request in requests)
    assert max(one.num_outputs for one in found) <= MAX_OUTPUTS


# What the engine does before the scheduler: texts become `in_tokens`, a seed the request's.
_NOT_DRAWN = {
    "seed",
    "bad_words",
    "dry_sequence_breakers",
    "structured_outputs",  # a grammar by the time a request exists
    "reasoning_tags",
    "reasoning_budget_message",  # in token ids
    "inside_reasoning",
    "stop_after_reasoning",
    "shown_special_token_ids",
}


def test_every_parameter_takes_several_values_and_every_grammar_kind_occurs():
    vocabulary = RequestVocabulary(500, EOS, has_grammars=True, texts=("a", "bc"))
    found = random_requests(600, 0, vocabulary, 16, 120)
    samplings = [one.request.sampling for one in found]
    for name in (field.name for field in fields(SamplingParams)):
        values = {repr(getattr(sampling, name)) for sampling in samplings}
        assert (len(values) > 1) == (name not in _NOT_DRAWN), name
    for name in ("bad_words", "reasoning"):
        values = {repr(getattr(one.in_tokens, name)) for one in samplings if one.in_tokens}
        assert len(values) > 5, name
    assert {None, 0} < {sampling.max_tokens for sampling in samplings}
    grammars = {one.grammar for one in samplings if one.grammar is not None}
    assert {grammar.kind for grammar in grammars} == set(get_args(GrammarKind))
    assert len({grammar.text for grammar in grammars}) == len(grammars) > 9
    searches = [one.beams for one in found if one.beams is not None]
    assert {search.beam_width for search in searches} == {1, 2, 3}
    assert len({(one.early_stopping, one.ignore_eos) for one in searches}) == 4
    assert {one.request.pooling for one in found} == {None, Pooling.LAST, Pooling.MEAN, Pooling.CLS}
    assert len({one.request.cache_salt for one in found}) > 1


def test_options_out_of_range_are_config_errors():
    for make in (
        lambda: VerifyOptions(num_requests=0),
        lambda: VerifyOptions(rounds=0),
        lambda: VerifyOptions(threads=()),
        lambda: VerifyOptions(threads=(0,)),
        lambda: CacheConfig(block_size=12),
    ):
        with pytest.raises(ConfigError):
            make()
