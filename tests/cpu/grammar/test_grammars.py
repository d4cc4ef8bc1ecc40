"""Grammars: samples under one always fit it, and a sequence's state is its tokens alone."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from grammar_sampling import sampled_text, sampled_tokens, state_for
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema_rs import Draft202012Validator
from tiny_checkpoint import write_checkpoint

from quickstep.errors import RequestError
from quickstep.runtime.sampling.sampler import SampleFailure, sample_row
from quickstep.text.grammar.grammars import GrammarCompiler
from quickstep.text.grammar.json_schema import KNOWN_FORMATS
from quickstep.text.grammar.matcher import (
    GrammarVocabulary,
    Refusal,
    build_matcher,
    grammar_vocabulary,
)
from quickstep.text.grammar.source import GrammarLimits, GrammarSource
from quickstep.text.tokenizer import Tokenizer
from quickstep.types import Grammar, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.open(write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, 264)


def objects(inner):
    names = st.lists(st.text("ab", min_size=1, max_size=3), max_size=3, unique=True)
    return names.flatmap(
        lambda keys: st.tuples(*[inner] * len(keys)).map(
            lambda values: {
                "type": "object",
                "properties": dict(zip(keys, values, strict=True)),
                "required": keys[:1],
                "additionalProperties": False,
            }
        )
    )


LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"enum": ["x", 'q"\\', 3, None]}]),
    st.integers(0, 6).map(lambda length: {"type": "string", "maxLength": length}),
    st.tuples(st.integers(-50, 0), st.integers(0, 50)).map(
        lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[1]}
    ),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        inner.map(lambda item: {"type": "array", "items": item, "maxItems": 3}),
        st.tuples(inner, inner).map(lambda both: {"anyOf": list(both)}),
    ),
    max_leaves=6,
)


STRING = re.compile(r'"(?:\\.|[^"\\])*"')


def fits(value, schema):
    """The keywords that `SCHEMAS` uses, by their definition."""
    if "anyOf" in schema:
        return any(fits(value, other) for other in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "array":
            if not isinstance(value, list) or len(value) > schema["maxItems"]:
                return False
            return all(fits(item, schema["items"]) for item in value)
    known = schema["properties"]
    if not isinstance(value, dict):
        return False
    return set(schema["required"]) <= set(value) <= set(known) and all(
        fits(item, known[name]) for name, item in value.items()
    )


@settings(max_examples=60, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 1.0, 50.0]))
def test_whatever_is_sampled_under_a_schema_parses_and_fits(
    compiler, tokenizer, schema, seed, temperature
):
    grammar = Grammar.of_json_schema(schema)
    text = sampled_text(compiler, tokenizer, grammar, seed, temperature=temperature)
    value = json.loads(text)
    assert fits(value, schema)
    bare = STRING.sub("", text)
    assert not re.search(r"(?<![:,])\s|\s\s|[:,]\S", bare)  # one line, spaced as json.dumps does


@pytest.mark.parametrize("seed", range(5))
def test_any_json_object_parses(compiler, tokenizer, seed):
    text = sampled_text(compiler, tokenizer, Grammar.of_json_object(), seed, temperature=0.8)
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "pattern", [r"[0-9]{3}-[a-f]{2}", r"(yes|no)!?", r"a/b|c\.d", r"[äöü]{2,4}"]
)
@pytest.mark.parametrize("seed", range(5))
def test_a_regex_matches_the_whole_text(compiler, tokenizer, pattern, seed):
    assert re.fullmatch(pattern, sampled_text(compiler, tokenizer, Grammar.of_regex(pattern), seed))


def test_a_choice_gives_each_of_its_texts_and_nothing_else(compiler, tokenizer):
    choices = ["red", "re", 'a "quoted" \\ one', "line\nbreak", "größe", "<|end|>"]
    grammar = Grammar.of_choice(choices)
    sampled = {sampled_text(compiler, tokenizer, grammar, seed) for seed in range(60)}
    assert sampled == set(choices)


def test_a_lark_grammar_derives_the_text(compiler, tokenizer):
    grammar = Grammar.of_lark('start: "[" item ("," item)* "]"\nitem: /[a-c]{1,2}/')
    for seed in range(5):
        text = sampled_text(compiler, tokenizer, grammar, seed)
        assert re.fullmatch(r"\[[a-c]{1,2}(,[a-c]{1,2})*\]", text)


def test_llama_cpps_grammar_derives_the_text(compiler, tokenizer):
    grammar = Grammar.of_gbnf('root ::= "(" root ")" | [a-c]{2}\n')
    assert re.fullmatch(r"\(*[a-c]{2}\)*", sampled_text(compiler, tokenizer, grammar))


def test_min_tokens_keeps_a_grammar_going_where_more_may_follow(compiler, tokenizer):
    sampling = SamplingParams(grammar=Grammar.of_regex("[ab]+"), min_tokens=40, max_tokens=None)
    assert all(len(sampled_tokens(compiler, tokenizer, sampling, seed)) > 40 for seed in range(5))


def test_min_tokens_does_not_hold_a_grammar_that_is_complete(compiler, tokenizer):
    text = sampled_text(
        compiler, tokenizer, Grammar.of_choice(["ab"]), min_tokens=10, max_tokens=99
    )
    assert text == "ab"


def test_penalties_and_bias_change_the_sample_but_not_the_form(compiler, tokenizer):
    sampling = {
        "logit_bias": {0: 100.0, 5: 100.0},
        "repetition_penalty": 1.9,
        "frequency_penalty": 2.0,
        "top_k": 3,
        "min_p": 0.5,
    }
    for seed in range(5):
        text = sampled_text(compiler, tokenizer, Grammar.of_json_schema(SCHEMA), seed, **sampling)
        assert set(json.loads(text)) <= set(SCHEMA["properties"])


@pytest.mark.parametrize("seed", range(6))
def test_a_state_rebuilt_from_any_prefix_continues_as_if_it_had_stayed(compiler, tokenizer, seed):
    sampling = SamplingParams(grammar=Grammar.of_json_schema(SCHEMA), temperature=1.5, top_p=0.95)
    whole = sampled_tokens(compiler, tokenizer, sampling, seed)
    for cut in range(len(whole)):
        again = sampled_tokens(compiler, tokenizer, sampling, seed, outputs=whole[:cut])
        assert again == whole


def test_sequences_of_one_grammar_share_no_state(compiler, tokenizer):
    sampling = SamplingParams(grammar=Grammar.of_regex("ab|cd"), temperature=0.0)
    first, second = (state_for(compiler, tokenizer, sampling) for _ in range(2))
    [a] = tokenizer.encode("a")
    [c] = tokenizer.encode("c")
    first.record(a)
    second.record(c)
    row = np.zeros(264, dtype=np.float32)
    sampled = [sample_row(row, state).token_id for state in (first, second)]
    assert sampled == [*tokenizer.encode("b"), *tokenizer.encode("d")]


def test_rows_past_the_end_stay_at_the_end(compiler, tokenizer):
    [end] = tokenizer.eos_token_ids
    state = state_for(compiler, tokenizer, SamplingParams(grammar=Grammar.of_choice(["a"])))
    for token_id in [*tokenizer.encode("a"), end, end]:
        state.record(token_id)
    assert sample_row(np.zeros(264, dtype=np.float32), state).token_id == end


def test_a_grammar_that_exhausts_its_limits_fails_its_row_alone(tokenizer):
    tight = GrammarCompiler(tokenizer, 264, GrammarLimits(lexer_states=60))
    sampling = SamplingParams(grammar=Grammar.of_regex("([ab]*a[ab]{9}){3}"), temperature=1.0)
    state = state_for(tight, tokenizer, sampling)
    results = []
    for position in range(100):
        row = np.random.default_rng(position).normal(size=264).astype(np.float32)
        results.append(sample_row(row, state))
        if isinstance(results[-1], SampleFailure):
            break
        state.record(results[-1].token_id)
    assert isinstance(results[-1], SampleFailure)
    assert "the grammar cannot be followed" in results[-1].reason
    assert results[-1].is_refused


def chain(length, inner):
    definitions = {f"d{i}": inner({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "null"}}}


def nested(depth):
    return {"items": nested(depth - 1)} if depth else {}


REFUSED = [
    (Grammar.of_gbnf("root ::= ("), "is no GBNF"),
    (Grammar.of_gbnf('root ::= "a" # ' + "x" * 5000), "characters of GBNF"),
    (Grammar.of_json_schema({"type": "array", "uniqueItems": True}, strict=True), "uniqueItems"),
    (Grammar.of_json_schema({"properties": {"a": {"not": {"format": "date"}}}}), "not"),
    (Grammar.of_json_schema({"type": "string", "not": {}}), "false"),
    (Grammar.of_json_schema({"if": {"multipleOf": 2}, "then": {"minimum": 3}}), "if"),
    (Grammar.of_json_schema({"contains": {"multipleOf": 2}, "maxContains": 1}), "contains"),
    (Grammar.of_json_schema({"oneOf": [{"multipleOf": 2}, {"minimum": 5}]}, strict=True), "oneOf"),
    (Grammar.of_json_schema({"const": 2**53 + 1}), "9007199254740993 in const"),
    (Grammar.of_lark('start: %json {"enum": [1.00000000000000000001]}'), "1.00000000000000000001"),
    (Grammar.of_json_schema({"dependentRequired": {"a": 1}}), "dependentRequired"),
    (Grammar.of_json_schema({"type": "thing"}), "thing"),
    (Grammar.of_json_schema({"type": "integer", "minimum": 3, "maximum": 1}), "minimum"),
    (Grammar.of_json_schema({"$ref": "file:///etc/passwd"}), "not present"),
    (Grammar.of_json_schema({"$ref": "http://127.0.0.1:1/x"}), "not present"),
    (Grammar.of_json_schema({"x-guidance": {"lenient": True}, "not": {}}), "x-guidance"),
    (Grammar.of_json_schema("[1"), "not valid JSON"),
    (Grammar.of_json_schema("[]"), "must be an object"),
    (Grammar.of_json_schema("\ud800"), "half a surrogate"),
    (Grammar.of_json_schema(nested(40)), "levels, the limit is 32"),
    (Grammar.of_json_schema("[" * 60_000), "not valid JSON"),
    (Grammar.of_json_schema({"description": "x" * 2_100_000}), "the limit is 2097152"),
    (Grammar.of_json_schema(chain(1200, lambda ref: {"items": ref})), "levels of $ref"),
    (Grammar.of_regex("(a"), "unclosed group"),
    (Grammar.of_regex("a(?=b)"), "look-around"),
    (Grammar.of_regex(""), "empty"),
    (Grammar.of_regex("a" * 2049), "the limit is 2048"),
    (Grammar.of_choice([]), "empty choice"),
    (Grammar.of_choice(["a", ""]), "empty choice"),
    (Grammar.of_choice(["a"] * 1025), "the limit is 1024"),
    (Grammar.of_lark("start: missing"), "missing"),
    (Grammar.of_lark("start: %json"), "%json"),
    (Grammar.of_lark("start: " + "(" * 600 + '"a"' + ")" * 600), "brackets"),
    (Grammar.of_lark("start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(5000))), "lines"),
    (
        Grammar.of_lark(f"start: %json {json.dumps(chain(1200, lambda ref: {'items': ref}))}"),
        "levels of $ref",
    ),
]


@pytest.mark.parametrize(("grammar", "words"), REFUSED)
def test_what_cannot_be_enforced_is_refused_in_words(compiler, grammar, words):
    with pytest.raises(RequestError) as caught:
        compiler.compile(grammar)
    assert words in str(caught.value)
    assert str(caught.value).startswith("grammar ")
    assert "\n" not in str(caught.value)
    assert caught.value.param == "grammar"


def test_chains_within_the_limits_compile(compiler):
    compiler.compile(Grammar.of_json_schema(chain(200, lambda ref: {"items": ref})))
    compiler.compile(Grammar.of_json_schema(chain(17, lambda ref: nested_around(ref, 12))))
    rules = "\n".join(f"a{i}: (a{i + 1})" for i in range(500))
    compiler.compile(Grammar.of_lark(f'start: a0\n{rules}\na500: "x"'))


def nested_around(inner, depth):
    for _ in range(depth):
        inner = {"properties": {"a": inner}}
    return inner


def test_a_grammar_that_was_dropped_from_the_cache_is_compiled_again(tokenizer):
    small = GrammarCompiler(tokenizer, 264, GrammarLimits(kept=2))
    grammars = [Grammar.of_choice([word]) for word in ("one", "two", "six", "ten")]
    for grammar in grammars:
        small.compile(grammar)
    assert small.num_kept == 2
    assert [sampled_text(small, tokenizer, grammar) for grammar in grammars] == [
        "one",
        "two",
        "six",
        "ten",
    ]


FORMATS = ["path", "file-path", "binary", "password", "decimal", "regex", "rhyme", "int64"]


@pytest.mark.parametrize("format_", FORMATS)
def test_an_unknown_format_is_an_annotation(compiler, tokenizer, format_):
    schema = {"type": "string", "format": format_, "pattern": "^[a-c]{2}$"}
    assert compiler.compile(Grammar.of_json_schema(schema)).ignored == ()
    for grammar in (
        Grammar.of_json_schema({"type": "array", "items": schema, "minItems": 2, "maxItems": 2}),
        Grammar.of_lark(f'start: "[" v ", " v "]"\nv: %json {json.dumps(schema)}'),
    ):
        text = sampled_text(compiler, tokenizer, grammar)
        assert re.fullmatch(r'\["[a-c]{2}", "[a-c]{2}"\]', text)


def test_known_formats_are_those_of_the_installed_library(compiler, tokenizer):
    vocabulary = grammar_vocabulary(GrammarVocabulary.of(tokenizer, 264), None)
    for name in [*KNOWN_FORMATS, *FORMATS]:
        source = GrammarSource("json_schema", json.dumps({"type": "string", "format": name}))
        if name in KNOWN_FORMATS:
            build_matcher(source, vocabulary, GrammarLimits())
        else:
            with pytest.raises(Refusal, match="Unknown format"):
                build_matcher(source, vocabulary, GrammarLimits())


OVERLAPPING = {"oneOf": [{"type": "integer"}, {"type": "number", "maximum": 9}]}


def test_one_of_is_taken_as_any_of_where_branches_may_overlap_and_reported(compiler, tokenizer):
    told = json.dumps({**OVERLAPPING, "x-guidance": {"lenient": False}})
    for grammar in (
        Grammar.of_json_schema(OVERLAPPING),
        Grammar.of_json_schema({"properties": {"a": OVERLAPPING}, "required": ["a"]}),
        Grammar.of_lark(f"start: %json {told}"),
    ):
        assert compiler.compile(grammar).ignored == ("oneOf",)
        json.loads(sampled_text(compiler, tokenizer, grammar, max_tokens=30))


def test_one_of_with_disjoint_branches_is_not_reported(compiler):
    disjoint = {"oneOf": [{"type": "integer"}, {"type": "string"}]}
    assert compiler.compile(Grammar.of_json_schema(disjoint)).ignored == ()


@pytest.mark.parametrize(
    ("schema", "is_valid"),
    [
        (
            {"dependentRequired": {"a": ["b"]}},
            lambda value: "a" not in value or "b" in value,
        ),
        (
            {"dependencies": {"a": ["b"], "b": {"required": ["c"]}}},
            lambda value: ("a" not in value or "b" in value) and ("b" not in value or "c" in value),
        ),
        ({"not": {"required": ["a", "b"]}}, lambda value: not {"a", "b"} <= set(value)),
        ({"properties": {"c": {"not": {}}}}, lambda value: "c" not in value),
    ],
)
def test_keywords_that_are_written_out_hold(compiler, tokenizer, schema, is_valid):
    base = {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in "abc"},
        "additionalProperties": False,
    }
    both = Grammar.of_json_schema({**base, "allOf": [schema]})
    sampled = [json.loads(sampled_text(compiler, tokenizer, both, seed)) for seed in range(20)]
    assert all(map(is_valid, sampled))
    assert len({tuple(value) for value in sampled}) > 3


# Each schema, and values that it allows and that have to be sampled.
WRITTEN_OUT = [
    ({"not": {"type": ["object", "array", "number", "string"]}}, [None, True]),
    ({"type": "integer", "minimum": 0, "maximum": 4, "not": {"enum": [1, 3]}}, [0, 2, 4]),
    ({"type": "string", "pattern": "^[ab]{1,2}$", "not": {"enum": ["a", "bb", "ba"]}}, ["aa", "b"]),
    ({"enum": ["x", "y", "z"], "not": {"const": "y"}}, ["x", "z"]),
    ({"type": "boolean", "not": {"const": True}}, [False]),
    (
        {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"type": "null"}},
            "required": ["a"],
            "additionalProperties": False,
            "if": {"properties": {"a": {"const": 1}}},
            "then": {"required": ["b"]},
            "else": {"properties": {"b": False}},
        },
        [{"a": 1, "b": None}, {"a": 2}],
    ),
    (
        {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "contains": {"const": 2}},
        [[2], [1, 2], [2, 1]],
    ),
    (
        {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3, "contains": {"const": 2}}
        | {"maxContains": 1, "minItems": 2},
        [[1, 2], [2, 1], [1, 1, 2]],
    ),
    (
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1},
        [[True], [False], [True, False], [False, True]],
    ),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "minProperties": 1}
        | {"additionalProperties": {"type": "null"}},
        [{"a": None}, {"b": None}, {"a": None, "b": None}],
    ),
    (
        {"type": "object", "additionalProperties": {"const": 1}, "maxProperties": 1}
        | {"propertyNames": {"pattern": "^[xy]$"}},
        [{}, {"x": 1}, {"y": 1}],
    ),
    (
        {"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3}]}
        | {"minimum": 1, "maximum": 7},
        [1, 2, 6, 7],
    ),
    (
        {
            "oneOf": [
                {"type": "object", "required": ["a"], "properties": {"a": {"const": 1}}},
                {"type": "object", "required": ["b"], "properties": {"b": {"const": 2}}},
            ],
            "properties": {"a": {}, "b": {}},
            "additionalProperties": False,
        },
        [{"a": 1}, {"b": 2}],
    ),
    (
        {"type": "object", "properties": {"a": {"const": 1}}, "unevaluatedProperties": False},
        [{}, {"a": 1}],
    ),
    ({"type": "string", "format": "date", "pattern": "^(1999|2000|2004)-02-29"}, ["2000-02-29"]),
]


@pytest.mark.parametrize(("schema", "values"), WRITTEN_OUT)
def test_what_is_written_out_allows_what_the_schema_allows(compiler, tokenizer, schema, values):
    grammar = Grammar.of_json_schema(schema, strict=True)
    assert compiler.compile(grammar).ignored == ()
    validator = Draft202012Validator(schema, validate_formats=True)
    found = [json.loads(sampled_text(compiler, tokenizer, grammar, seed)) for seed in range(30)]
    assert all(map(validator.is_valid, found))
    assert all(value in found for value in values)


INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}


def test_bounds_of_64_bits_are_kept(compiler, tokenizer):
    for schema in (INT64, {"type": "integer", "minimum": 2**62}, {"type": "number", **INT64}):
        grammar = Grammar.of_json_schema(schema)
        low, high = schema.get("minimum"), schema.get("maximum", 2**63)
        for seed in range(10):
            assert low <= json.loads(sampled_text(compiler, tokenizer, grammar, seed)) <= high


def test_an_additional_property_never_has_a_declared_name(compiler):
    grammar = Grammar.of_json_schema({"type": "object", "properties": {"a": {"const": 1}}})
    matcher = compiler.compile(grammar).closing.matcher
    first = compiler.compile(grammar).closing.vocabulary.first_byte_id
    for text, fits in ((r'{"b": 2}', True), (r'{"a": 2}', False), (r'{"\u0061": 2}', False)):
        ids = [first + byte for byte in text.encode()]
        assert (matcher.validate_tokens(ids) == len(ids)) is fits


def test_a_control_character_of_a_schema_is_written_by_its_number(compiler, tokenizer):
    schema = {"const": "a\u0001"}
    told = json.dumps({**schema, "x-guidance": {"lenient": False}})
    for grammar in (Grammar.of_json_schema(schema), Grammar.of_lark(f"start: %json {told}")):
        assert json.loads(sampled_text(compiler, tokenizer, grammar)) == "a\u0001"


GBNF = 'root ::= "(" item ("," item)* ")"\nitem ::= [a-c]{1,2}'


def test_rules_are_lark_or_gbnf_by_how_they_are_written(compiler, tokenizer):
    assert Grammar.of_rules(GBNF).kind == "gbnf"
    assert Grammar.of_rules('# "x ::= y"\n  root  ::= "a"').kind == "gbnf"
    assert Grammar.of_rules('start: "a ::= b"\nitem: /::=/').kind == "lark"
    text = sampled_text(compiler, tokenizer, Grammar.of_rules(GBNF), max_tokens=40)
    assert re.fullmatch(r"\([a-c]{1,2}(,[a-c]{1,2})*\)", text)


def test_a_compiled_grammar_lives_as_long_as_it_is_held(tokenizer):
    small = GrammarCompiler(tokenizer, 264, GrammarLimits(kept=1))
    first, second = Grammar.of_choice(["one"]), Grammar.of_choice(["two"])
    held = small.compile(first)
    small.compile(second)
    assert small.num_kept == 1
    matcher, closing = small.new_matcher(first)
    assert not matcher.is_error() and closing is held.closing
    del held, closing
    small.compile(second)
    with pytest.raises(RequestError, match="not compiled"):
        small.new_matcher(first)


def test_a_matcher_for_a_step_compiles_nothing(tokenizer):
    fresh = GrammarCompiler(tokenizer, 264)
    with pytest.raises(RequestError, match="not compiled"):
        fresh.new_matcher(Grammar.of_choice(["one"]))
    assert fresh.trial.num_started == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"ignore_eos": True}, "ignore_eos"),
        ({"allowed_token_ids": (1,)}, "allowed_token_ids"),
        ({"grammar": "start"}, "grammar"),
    ],
)
def test_parameters_that_a_grammar_contradicts_are_refused(fields, param):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{"grammar": Grammar.of_json_object(), **fields})
    assert caught.value.param == param


def test_an_unknown_kind_of_grammar_is_refused():
    with pytest.raises(RequestError, match="known are json_schema"):
        Grammar("ebnf", "a")
