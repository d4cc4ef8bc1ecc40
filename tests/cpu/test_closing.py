"""Near the limit of tokens a grammar is brought to its end, wherever there is one in reach."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from grammar_draws import PROMPT
from hypothesis import given, settings
from hypothesis import strategies as st

import quickstep
from quickstep.engine.grammars import GrammarCompiler
from quickstep.engine.tokenizer import Tokenizer
from quickstep.runtime.sampler import Sample, sample_row
from quickstep.runtime.sampling_state import SamplingState
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
    """The shorter of two, which another could hide."""
    return st.tuples(inner, inner).map(
        lambda both: (
            {"anyOf": [both[0][0], both[1][0]]},
            min(both[0][1], both[1][1], key=num_tokens),
        )
    )


def num_tokens(value):
    text = json.dumps(value, separators=(",", ":"))
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
