"""A preempted sequence continues with the state that it had: nothing is searched or replayed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import quickstep
from quickstep.runtime.sampling import penalties
from quickstep.runtime.sampling.closing_search import ClosingSearch
from quickstep.runtime.sampling.sampler import Sample, sample_row
from quickstep.runtime.slots import SlotTable
from quickstep.sampling_params import TokenForms
from quickstep.text.grammar.grammars import GrammarCompiler
from quickstep.text.tokenizer import Tokenizer
from quickstep.types import Admission, Grammar, SamplingParams

TOKENIZER = Tokenizer.open(Path(quickstep.__file__).parent / "bundled" / "demo")
VOCAB = 4096
COMPILER = GrammarCompiler(TOKENIZER, VOCAB)
NUMBERS = {"type": "array", "items": {"type": "number"}, "minItems": 8, "maxItems": 8}
GRAMMAR = Grammar.of_json_schema(NUMBERS)
HELD = COMPILER.compile(GRAMMAR)
PROMPT = (1, 2, 3)
NEAR_ITS_END = SamplingParams(grammar=GRAMMAR, max_tokens=40)
REPEATING = SamplingParams(dry_multiplier=0.8, in_tokens=TokenForms(dry_breakers=((7,),)))


def admission(sampling, outputs=(), sequence_id="r#0", slot=0, seed=1):
    ends = TOKENIZER.eos_token_ids
    return Admission(slot, sequence_id, (*PROMPT, *outputs), len(PROMPT), sampling, seed, ends)


def table_of(num_slots=2):
    return SlotTable(num_slots, VOCAB, COMPILER.new_matcher)


def sampled(slot, num_tokens):
    """Sample tokens of one slot at random."""
    tokens = []
    for _ in range(num_tokens):
        rng = np.random.default_rng((1, slot.state.num_outputs))
        row = rng.normal(scale=3.0, size=VOCAB).astype(np.float32)
        sample = sample_row(row, slot.state)
        assert isinstance(sample, Sample), sample
        tokens.append(sample.token_id)
        slot.last_token = sample.token_id
        slot.state.record(sample.token_id)
    return tokens


@pytest.fixture
def work(monkeypatch):
    """Names of the expensive parts of a state that was built or searched."""
    done = []
    search, matches = ClosingSearch.ending, penalties._suffix_matches
    monkeypatch.setattr(ClosingSearch, "ending", lambda s: done.append("search") or search(s))
    monkeypatch.setattr(penalties, "_suffix_matches", lambda t: done.append("dry") or matches(t))
    return done


@pytest.mark.parametrize("sampling", [NEAR_ITS_END, REPEATING], ids=["grammar", "dry"])
def test_a_preempted_sequence_returns_without_a_search(sampling, work):
    whole = table_of()
    whole.move([], [admission(sampling)])
    expected = sampled(whole[0], 24)
    table = table_of()
    table.move([], [admission(sampling)])
    outputs = sampled(table[0], 12)
    assert work
    table.move([0], [])
    work.clear()
    table.move([], [admission(sampling, outputs, slot=1)])
    outputs += sampled(table[1], 6)
    table.move([1], [])
    table.move([], [admission(sampling, outputs)])
    num_searches = work.count("search")
    work.clear()
    replayed = table_of()
    replayed.move([], [admission(sampling, outputs)])
    assert work, "to replay is what takes long"
    assert num_searches <= 6, "one for each new token at most"
    outputs += sampled(table[0], 6)
    assert outputs == expected


def test_a_released_sequence_does_not_lend_its_state_to_another(work):
    table = table_of()
    table.move([], [admission(NEAR_ITS_END)])
    outputs = sampled(table[0], 12)
    others = [
        admission(NEAR_ITS_END, outputs[:-1]),  # a step's token was discarded
        admission(replace(NEAR_ITS_END, max_tokens=41), outputs),
        admission(NEAR_ITS_END, outputs, seed=2),
        admission(NEAR_ITS_END, outputs, sequence_id="s#0"),
    ]
    for other in others:
        again = table_of()
        again.move([], [admission(NEAR_ITS_END)])
        sampled(again[0], 12)
        work.clear()
        again.move([0], [other])
        assert "search" in work, other
        assert again[0].state.num_outputs == len(other.token_ids) - len(PROMPT)


def test_no_more_states_are_kept_than_there_are_slots(work):
    table = table_of(num_slots=2)
    outputs = {}
    for name in ("a#0", "b#0", "c#0"):
        table.move([], [admission(NEAR_ITS_END, sequence_id=name)])
        outputs[name] = sampled(table[0], 12)
        table.move([0], [])
    work.clear()
    for name in ("c#0", "b#0"):
        table.move([0], [admission(NEAR_ITS_END, outputs[name], sequence_id=name)])
        assert not work
    table.move([0], [admission(NEAR_ITS_END, outputs["a#0"], sequence_id="a#0")])
    assert work
