"""Near the limit of tokens a grammar is brought to its end, wherever there is one in reach."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from grammar_draws import PROMPT
from hypothesis import given, settings
from hypothesis import strategies as st

import quickstep
from quickstep.engine.grammars import GrammarCompiler
from quickstep.engine.tokenizer import Tokenizer
from quickstep.runtime.sampler import Sample, sample_row
from quickstep.runtime.sampling_state import SamplingState
from quickstep.sampling_params import TokenForms
from quickstep.types import Admission, Grammar, SamplingParams

DEMO = Path(quickstep.__file__).parent / "bundled" / "demo"
VOCAB = 4096
TOKENIZER = Tokenizer.open(DEMO)
COMPILER = GrammarCompiler(TOKENIZER, VOCAB)


def state_for(sampling, outputs=(), seed=1):
    ends = TOKENIZER.eos_token_ids
    admission = Admission(0, "r#0", (*PROMPT, *outputs), len(PROMPT), sampling, seed, ends)
    return SamplingState(admission, VOCAB, COMPILER.new_matcher)


def row_of(seed, position):
    """Logits that know no JSON: they like to write on."""
    return np.random.default_rng((seed, position)).normal(scale=3.0, size=VOCAB).astype(np.float32)


def drawn(sampling, seed=1, rebuild_at=None):
    """Output tokens up to the end token or `max_tokens`, and whether the end token came."""
    state, tokens = state_for(sampling, seed=seed), []
    while len(tokens) < sampling.max_tokens:
        if len(tokens) == rebuild_at:
            state = state_for(sampling, tokens, seed)
        sample = sample_row(row_of(seed, len(tokens)), state)
        assert isinstance(sample, Sample), sample
        if sample.token_id in TOKENIZER.eos_token_ids:
            return tokens, True
        tokens.append(sample.token_id)
        state.record(sample.token_id)
    return tokens, False


def text_of(tokens):
    return b"".join(map(TOKENIZER.token_bytes, tokens)).decode()


def objects(inner):
    keys = st.lists(st.sampled_from(["a", "name", "long_key", "x y"]), max_size=3, unique=True)
    return keys.flatmap(
        lambda names: st.tuples(*[inner] * len(names)).map(
            lambda values: (
                {
                    "type": "object",
                    "properties": {
                        name: value[0] for name, value in zip(names, values, strict=True)
                    },
                    "required": names,
                    "additionalProperties": False,
                },
                {name: value[1] for name, value in zip(names, values, strict=True)},
            )
        )
    )


def arrays(inner):
    return st.tuples(inner, st.integers(0, 3)).map(
        lambda pair: (
            {"type": "array", "items": pair[0][0], "minItems": pair[1]},
            [pair[0][1]] * pair[1],
        )
    )


def either(inner):
    """The shorter of two. A pattern would hide a literal text: the search tries few characters."""
    return (
        st.tuples(inner, inner)
        .filter(lambda both: "pattern" not in str(both))
        .map(
            lambda both: (
                {"anyOf": [both[0][0], both[1][0]]},
                min(both[0][1], both[1][1], key=num_tokens),
            )
        )
    )


def num_tokens(value):
    text = json.dumps(value)
    return len(TOKENIZER.encode(text, add_special_tokens=False))


# (schema, a shortest value)
LEAVES = st.one_of(
    st.just(({"type": "boolean"}, True)),
    st.just(({"type": "null"}, None)),
    st.just(({"type": "string"}, "")),
    st.just(({"type": "object"}, {})),
    st.just(({"type": "integer"}, 0)),
    st.just(({"enum": ["a long way to say yes, isn't it", "no", "never"]}, "no")),
    st.integers(1, 12).map(lambda n: ({"type": "string", "minLength": n}, "a" * n)),
    st.integers(0, 3000).map(lambda n: ({"type": "integer", "minimum": n}, n)),
    st.just(({"type": "string", "pattern": "^[a-z]{3}-[0-9]{2}$"}, "aaa-00")),
)
SCHEMAS = st.recursive(
    LEAVES, lambda inner: st.one_of(objects(inner), arrays(inner), either(inner)), max_leaves=5
)


@settings(max_examples=60)
@given(SCHEMAS, st.integers(0, 6), st.integers(0, 99), st.sampled_from([0.0, 1.0, 3.0]))
def test_what_has_room_for_a_shortest_value_parses(schema, spare, seed, temperature):
    limit = max(1, num_tokens(schema[1]) + spare)
    grammar = Grammar.of_json_schema(schema[0])
    tokens, has_ended = drawn(
        SamplingParams(grammar=grammar, max_tokens=limit, temperature=temperature), seed
    )
    json.loads(text_of(tokens))
    assert has_ended or len(tokens) == limit


@settings(max_examples=25)
@given(SCHEMAS, st.integers(0, 20), st.integers(0, 99), st.integers(0, 30))
def test_a_state_rebuilt_on_the_way_to_the_end_steers_the_same(schema, spare, seed, cut):
    limit = max(1, num_tokens(schema[1]) + spare)
    sampling = SamplingParams(grammar=Grammar.of_json_schema(schema[0]), max_tokens=limit)
    assert drawn(sampling, seed, rebuild_at=min(cut, limit - 1)) == drawn(sampling, seed)


@pytest.mark.parametrize("limit", [40, 90, 250])
def test_any_object_is_closed_whatever_the_model_prefers(limit):
    for seed in range(4):
        sampling = SamplingParams(grammar=Grammar.of_json_object(), max_tokens=limit)
        tokens, has_ended = drawn(sampling, seed)
        assert isinstance(json.loads(text_of(tokens)), dict)
        assert has_ended


def test_only_the_last_tokens_are_steered():
    grammar = Grammar.of_regex("[a-z ]*!")
    steered, _ = drawn(SamplingParams(grammar=grammar, max_tokens=120), seed=5)
    free, _ = drawn(SamplingParams(grammar=grammar, max_tokens=150), seed=5)
    assert steered[:118] == free[:118]
    assert text_of(steered).endswith("!") and "!" not in text_of(free[:119])


def test_what_no_ending_can_fit_is_left_undone():
    schema = {"type": "string", "minLength": 500, "maxLength": 600}
    sampling = SamplingParams(grammar=Grammar.of_json_schema(schema), max_tokens=8)
    tokens, has_ended = drawn(sampling)
    assert len(tokens) == 8 and not has_ended


def test_the_context_limits_the_output_as_max_tokens_does():
    grammar = Grammar.of_json_object()
    short = SamplingParams(grammar=grammar, max_tokens=None, in_tokens=TokenForms(max_tokens=30))
    state, tokens = state_for(short), []
    while len(tokens) < 30:
        sample = sample_row(row_of(1, len(tokens)), state)
        assert isinstance(sample, Sample)
        tokens.append(sample.token_id)
        state.record(sample.token_id)
        if sample.token_id in TOKENIZER.eos_token_ids:
            break
    json.loads(text_of(tokens[:-1]))


@given(st.text(alphabet=" a{}\n", max_size=40))
def test_a_text_is_spelled_in_no_more_tokens_than_the_tokenizer_takes(text):
    _, vocabulary = COMPILER.new_matcher(Grammar.of_json_object())
    ids = vocabulary.spell(text.encode())
    assert ids is not None and text_of(ids) == text
    assert len(ids) <= len(TOKENIZER.encode(text, add_special_tokens=False))
