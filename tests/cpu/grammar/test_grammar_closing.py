"""Near the limit of tokens a grammar is brought to its end, wherever there is one in reach."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from grammar_sampling import PROMPT
from hypothesis import given, settings
from hypothesis import strategies as st

import quickstep
from quickstep.runtime.sampling.grammar import ClosingGuard, ClosingStart
from quickstep.runtime.sampling.sampler import Sample, sample_row
from quickstep.runtime.sampling.state import SamplingState
from quickstep.sampling_params import TokenForms
from quickstep.text.grammar.grammars import GrammarCompiler
from quickstep.text.tokenizer import Tokenizer
from quickstep.types import Admission, Grammar, SamplingParams

DEMO = Path(quickstep.__file__).parent / "bundled" / "demo"
VOCAB = 4096
TOKENIZER = Tokenizer.open(DEMO)
COMPILER = GrammarCompiler(TOKENIZER, VOCAB)
VOCABULARY = COMPILER.compile(Grammar.of_json_object()).closing.vocabulary


def state_for(sampling, outputs=(), seed=1):
    ends = TOKENIZER.eos_token_ids
    COMPILER.compile(sampling.grammar)
    admission = Admission(0, "r#0", (*PROMPT, *outputs), len(PROMPT), sampling, seed, ends)
    return SamplingState(admission, VOCAB, COMPILER.new_matcher)


def row_of(seed, position):
    """Logits that know no JSON: they like to write on."""
    return np.random.default_rng((seed, position)).normal(scale=3.0, size=VOCAB).astype(np.float32)


def sampled(sampling, seed=1, rebuild_at=None, bias=0.0):
    """Output tokens up to the end token or `max_tokens`, and whether the end token came."""
    state, tokens = state_for(sampling, seed=seed), []
    while len(tokens) < sampling.max_tokens:
        if len(tokens) == rebuild_at:
            state = state_for(sampling, tokens, seed)
        row = (row_of(seed, len(tokens)) + bias).astype(np.float32)
        sample = sample_row(row, state)
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


def num_tokens(value):
    text = json.dumps(value)
    return len(TOKENIZER.encode(text, add_special_tokens=False))


def either(keyword):
    """The shorter of two. A pattern would hide a literal text: the search tries few characters."""
    return lambda inner: (
        st.tuples(inner, inner)
        .filter(lambda both: "pattern" not in str(both))
        .map(
            lambda both: (
                {keyword: [both[0][0], both[1][0]]},
                min(both[0][1], both[1][1], key=num_tokens),
            )
        )
    )


def tuples(inner):
    """Arrays whose first items have schemas of their own."""
    return st.tuples(inner, inner).map(
        lambda both: (
            {
                "type": "array",
                "prefixItems": [both[0][0], both[1][0]],
                "items": False,
                "minItems": 2,
            },
            [both[0][1], both[1][1]],
        )
    )


# branches of different types, so that they are provably disjoint
ONE_OF = st.just(
    (
        {
            "oneOf": [
                {"type": "string", "minLength": 4},
                {"type": "array", "items": {"type": "number"}, "minItems": 2},
                {"type": "null"},
            ]
        },
        None,
    )
)
# (schema, a shortest value)
LEAVES = st.one_of(
    st.just(({"type": "boolean"}, True)),
    st.just(({"type": "null"}, None)),
    st.just(({"type": "string"}, "")),
    st.just(({"type": "object"}, {})),
    st.just(({"type": "integer"}, 0)),
    st.just(({"type": "number"}, 0)),
    st.just(({"enum": ["a long way to say yes, isn't it", "no", "never"]}, "no")),
    st.just(({"type": ["number", "null"]}, 0)),
    st.integers(1, 12).map(lambda n: ({"type": "string", "minLength": n}, "a" * n)),
    st.integers(0, 3000).map(lambda n: ({"type": "integer", "minimum": n}, n)),
    st.just(({"type": "string", "pattern": "^[a-z]{3}-[0-9]{2}$"}, "aaa-00")),
    ONE_OF,
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner), arrays(inner), arrays(arrays(inner)), tuples(inner), either("anyOf")(inner)
    ),
    max_leaves=6,
)


@settings(max_examples=60)
@given(SCHEMAS, st.integers(0, 6), st.integers(0, 99), st.sampled_from([0.0, 1.0, 3.0]))
def test_what_has_room_for_a_shortest_value_parses(schema, spare, seed, temperature):
    limit = max(1, num_tokens(schema[1]) + spare)
    grammar = Grammar.of_json_schema(schema[0])
    tokens, has_ended = sampled(
        SamplingParams(grammar=grammar, max_tokens=limit, temperature=temperature), seed
    )
    json.loads(text_of(tokens))
    assert has_ended or len(tokens) == limit


@settings(max_examples=25)
@given(SCHEMAS, st.integers(0, 20), st.integers(0, 99))
def test_a_state_rebuilt_at_any_place_steers_the_same(schema, spare, seed):
    limit = max(1, num_tokens(schema[1]) + spare)
    sampling = SamplingParams(grammar=Grammar.of_json_schema(schema[0]), max_tokens=limit)
    uninterrupted = sampled(sampling, seed)
    length = len(uninterrupted[0])
    for cut in range(0, length, 1 + length // 8):
        assert sampled(sampling, seed, rebuild_at=cut) == uninterrupted


NUMBERS = {"type": "array", "items": {"type": "number"}, "minItems": 2}


def recursive(properties, required=None, **definitions):
    node = {
        "type": "object",
        "properties": properties,
        "required": [*properties] if required is None else required,
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node, **definitions}}


NODE = {"$ref": "#/$defs/node"}
CHILDREN = {"type": "array", "items": NODE}
FIELDS = {f"required_number_{i}": {"type": "number"} for i in range(8)}
MAYBE_NODE = {"anyOf": [NODE, {"type": "null"}]}
RECURSIVE = {
    "a tree": recursive({"value": {"type": "integer"}, "left": MAYBE_NODE, "right": MAYBE_NODE}),
    "children first": recursive({"children": CHILDREN, **FIELDS}),
    "children last": recursive({**FIELDS, "children": CHILDREN}),
    "lists": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}},
    },
    "two of the same": {
        "$ref": "#/$defs/e",
        "$defs": {
            "e": {
                "anyOf": [
                    {"type": "integer"},
                    {"type": "array", "items": {"$ref": "#/$defs/e"}, "minItems": 2},
                ]
            }
        },
    },
    "in turn": recursive(
        {"next": {"$ref": "#/$defs/other"}, "padding": {"type": "boolean"}},
        other={"anyOf": [{"type": "array", "items": NODE, "minItems": 1}, {"type": "null"}]},
    ),
}
OPENERS = np.array(
    [b"{" in token or b"[" in token for token in map(TOKENIZER.token_bytes, range(VOCAB))]
)


@pytest.mark.parametrize("likes_levels", [0.0, 4.0, 9.0])
@pytest.mark.parametrize("kind", RECURSIVE)
def test_a_schema_that_contains_itself_is_closed_at_any_limit(kind, likes_levels):
    grammar = Grammar.of_json_schema(RECURSIVE[kind])
    shortest = COMPILER.compile(grammar).closing.ending.num_tokens
    for limit in (shortest + 1, shortest + 9, shortest + 40, shortest + 140):
        sampling = SamplingParams(grammar=grammar, max_tokens=limit, temperature=1.0)
        tokens, has_ended = sampled(sampling, limit, bias=likes_levels * OPENERS)
        json.loads(text_of(tokens))
        assert has_ended or len(tokens) == limit


KINDS = {
    "a tree": Grammar.of_json_schema(RECURSIVE["a tree"]),
    "numbers": Grammar.of_json_schema(NUMBERS),
    "nested arrays": Grammar.of_json_schema(
        {"type": "array", "items": NUMBERS, "minItems": 2, "maxItems": 4}
    ),
    "any object": Grammar.of_json_object(),
    "a choice of types": Grammar.of_json_schema(
        {"oneOf": [NUMBERS, {"type": "object", "required": ["a"], "additionalProperties": NUMBERS}]}
    ),
    "a pattern": Grammar.of_regex("(-?[0-9]+[.][0-9]{2,9};){2,40}"),
    "a grammar": Grammar.of_lark(
        'start: "(" (start | /[a-z]+/ | NUM)* ")"\nNUM: /[0-9]+[.][0-9]+/'
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [12, 60])
def test_every_kind_of_grammar_continues_the_same_after_a_preemption(kind, limit):
    sampling = SamplingParams(grammar=KINDS[kind], max_tokens=limit)
    for seed in range(2):
        uninterrupted = sampled(sampling, seed)
        for cut in range(1, len(uninterrupted[0]), 1 + limit // 10):
            assert sampled(sampling, seed, rebuild_at=cut) == uninterrupted


@pytest.mark.parametrize("seed", range(8))
def test_a_number_at_the_limit_is_complete(seed):
    grammar = Grammar.of_json_schema({"type": "number"})
    for limit in range(1, 7):
        tokens, _ = sampled(SamplingParams(grammar=grammar, max_tokens=limit), seed)
        assert isinstance(json.loads(text_of(tokens)), int | float)


def test_what_was_sampled_and_steered_away_leaves_no_trace():
    sampling = SamplingParams(grammar=KINDS["nested arrays"], max_tokens=30)
    [queried, silent] = [state_for(sampling) for _ in range(2)]
    tokens, _ = sampled(sampling)
    for token_id in tokens:
        for other in range(0, VOCAB, 401):
            queried.forced_token(other)
        assert queried.forced_token(token_id) == silent.forced_token(token_id) == token_id
        queried.record(token_id)
        silent.record(token_id)


TEN_OBJECTS = {
    "type": "object",
    "properties": {
        f"k{i}": {
            "type": "object",
            "properties": {f"x{j}": {"type": "number"} for j in range(5)},
            "required": [f"x{j}" for j in range(5)],
        }
        for i in range(10)
    },
    "required": [f"k{i}" for i in range(10)],
}


class CountingMatcher:
    """A matcher that counts the calls of it and of its copies."""

    def __init__(self, matcher, calls):
        self._matcher = matcher
        self._calls = calls

    def __getattr__(self, name):
        self._calls.append(name)
        return getattr(self._matcher, name)

    def deep_copy(self):
        return CountingMatcher(self._matcher.deep_copy(), self._calls)


@pytest.mark.parametrize("limit", [300, 420, 600])  # the end takes 390 tokens
def test_no_token_takes_more_than_a_bounded_search(limit):
    closing = COMPILER.compile(Grammar.of_json_schema(TEN_OBJECTS)).closing
    calls = []
    matcher = CountingMatcher(closing.matcher, calls)
    start = ClosingStart(matcher, closing.vocabulary, closing.ending)
    guard = ClosingGuard(start, limit, sorted(TOKENIZER.eos_token_ids))
    assert not calls  # an admission searches nothing
    tokens, _ = sampled(
        SamplingParams(grammar=Grammar.of_json_schema(TEN_OBJECTS), max_tokens=limit), 3
    )
    num_masks = num_tried = 0
    for token_id in tokens:
        calls.clear()
        guard.record(guard.forced_token(token_id))
        assert calls.count("compute_bitmask") <= 2 * 48
        assert len(calls) < 1500
        num_masks += calls.count("compute_bitmask")
        num_tried += calls.count("validate_tokens")
        # a known ending is tried where the matcher is: moving along it and back takes far longer
        assert calls.count("rollback") <= calls.count("compute_bitmask")
    assert (num_masks > 0) == (limit > 390)
    assert num_tried <= 24 * len(tokens)


@pytest.mark.parametrize("limit", [40, 90, 250])
def test_any_object_is_closed_whatever_the_model_prefers(limit):
    for seed in range(4):
        sampling = SamplingParams(grammar=Grammar.of_json_object(), max_tokens=limit)
        tokens, has_ended = sampled(sampling, seed)
        assert isinstance(json.loads(text_of(tokens)), dict)
        assert has_ended


def test_only_the_last_tokens_are_steered():
    grammar = Grammar.of_regex("[a-z ]*!")
    forced, _ = sampled(SamplingParams(grammar=grammar, max_tokens=120), seed=5)
    free, _ = sampled(SamplingParams(grammar=grammar, max_tokens=150), seed=5)
    assert forced[:118] == free[:118]
    assert text_of(forced).endswith("!") and "!" not in text_of(free[:119])


def test_what_no_ending_can_fit_is_left_undone():
    schema = {"type": "string", "minLength": 500, "maxLength": 600}
    sampling = SamplingParams(grammar=Grammar.of_json_schema(schema), max_tokens=8)
    tokens, has_ended = sampled(sampling)
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
    ending = VOCABULARY.spell(text)
    assert ending is not None
    ids = ending.tokens()
    assert text_of(ids) == text
    assert len(ids) == ending.num_tokens
    assert len(ids) <= len(TOKENIZER.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("pattern", [r"[a-z][a-z0-9_]+", r"([A-Za-z_]\w+\\\\)*([A-Za-z_]\w+)"])
def test_a_string_ends_that_needs_a_letter_anywhere(pattern):
    grammar = Grammar.of_json_schema({"type": "string", "pattern": pattern})
    ending = COMPILER.compile(grammar).closing.ending
    assert ending is not None and ending.path == '"aa"'


def test_a_grammar_whose_end_is_not_found_is_enforced_without_it():
    text = {"type": "string", "pattern": "zq"}
    schema = {"type": "array", "items": text, "minItems": 1}
    compiled = COMPILER.compile(Grammar.of_json_schema(schema))
    assert compiled.closing.ending is None
