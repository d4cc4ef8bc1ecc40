"""Random legal walks through the grammars of random schemas: what ends is valid.

The schemas are small and have the keywords that are written out, in each other and next to others.
A walk takes any byte that the grammar allows: it finds what no model would write.
"""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from jsonschema_rs import Draft202012Validator

from quickstep.errors import RequestError
from quickstep.text.grammar.matcher import (
    GrammarVocabulary,
    Refusal,
    build_matcher,
    grammar_vocabulary,
)
from quickstep.text.grammar.source import GrammarLimits, grammar_source
from quickstep.types import Grammar

END = 256
LIMIT = 160
BYTES = grammar_vocabulary(
    GrammarVocabulary([*(bytes((byte,)) for byte in range(END)), b"<end>"], [END], [END]),
    None,
    slices=[],
)
LIKELY = frozenset((END, *b'"}],[{:0123456789ab.x'))
CLOSING = (END, *b'}]"')
DEFINITIONS = {"d": {"type": "integer", "maximum": 3}, "t": {"items": {"$ref": "#/$defs/t"}}}
LEAVES = (
    {"type": "string", "maxLength": 3},
    {"type": "string", "minLength": 1, "maxLength": 2},
    {"type": "string", "pattern": "^ab"},
    {"type": "string", "pattern": "^(a|bc)$"},
    {"type": "string", "pattern": "^(?!ab|b$)[a-c]{1,3}$"},
    {"type": "string", "pattern": "^(?:^a|b)[ab]?$", "maxLength": 3},
    {"type": "string", "pattern": "a$", "maxLength": 2},
    {"type": "integer", "minimum": -3, "maximum": 4},
    {"type": "integer", "multipleOf": 2, "maximum": 10},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 3},
    {"type": ["integer", "null"]},
    {"type": "boolean"},
    {"enum": ["a", "ab", "b"]},
    {"enum": [1, 2, "a", None]},
    {"enum": [[], {}, 0, False]},
    {"const": 1},
    {"const": "x"},
    {"$ref": "#/$defs/d"},
    {"$ref": "#/$defs/t"},
    {},
)
NAMES = (
    {"enum": ["a", "b", "z"]},
    {"pattern": "^[a-c]"},
    {"maxLength": 1},
    {"type": "string"},
    {"not": {"enum": ["a", "d"]}},
    {"pattern": "^(?!a$)[a-d]+$"},
    {"pattern": "^[a-c]", "minLength": 1, "maxLength": 2},
)


class Schemas:
    """Makes random schemas; the same for the same seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def schema(self, depth):
        if depth == 0:
            return dict(self.random.choice(LEAVES))
        makes = self.random.choices(
            [self.an_object, self.an_array, lambda _: dict(self.random.choice(LEAVES))], [4, 3, 3]
        )[0]
        schema = makes(depth)
        match self.random.choice(
            ["not", "oneOf", "anyOf", "if", "cases", "only oneOf", "only not", *[""] * 8]
        ):
            case "cases":
                schema["allOf"] = [self.a_case(depth) for _ in range(self.random.randint(2, 5))]
            case "not":
                schema["not"] = self.schema(depth - 1)
            case "oneOf" | "anyOf" as keyword:
                schema[keyword] = [self.schema(depth - 1) for _ in range(2)]
            case "if":
                schema["if"] = self.schema(depth - 1)
                for keyword in self.some("then", "else"):
                    schema[keyword] = self.schema(depth - 1)
            case "only oneOf":
                return {"oneOf": [self.schema(depth - 1) for _ in range(3)]}
            case "only not":
                return {"not": self.schema(depth - 1)}
        return schema

    def an_object(self, depth):
        names = self.random.sample("abc", self.random.randint(1, 3))
        schema = {"type": "object", "properties": {name: self.schema(depth - 1) for name in names}}
        schema["required"] = self.some(*names)
        choices = {
            "additionalProperties": lambda: self.random.choice([False, {"type": "integer"}]),
            "minProperties": lambda: self.random.randint(0, 2),
            "maxProperties": lambda: self.random.randint(1, 4),
            "propertyNames": lambda: dict(self.random.choice(NAMES)),
            "dependentRequired": lambda: {
                name: [self.random.choice("abcd")]
                for name in "abcdef"[: self.random.choice((1, 6))]
            },
            "patternProperties": lambda: {
                pattern: dict(self.random.choice(LEAVES))
                for pattern in self.random.sample(["^[ab]", "b$", "^(?!a)[a-e]+$", "^d"], 2)
            },
            "unevaluatedProperties": lambda: self.random.random() < 0.5,
        }
        for keyword in self.some(*choices, odds=0.2):
            schema[keyword] = choices[keyword]()
        return schema

    def a_case(self, depth):
        condition = {
            "properties": {
                "a": self.random.choice([{"const": 1}, {"enum": ["a", 1]}, {"const": 2}])
            }
        }
        if self.random.random() < 0.6:
            condition["required"] = ["a"]
        if self.random.random() < 0.3:
            condition["type"] = "object"
        case = {"if": condition, "then": self.schema(depth - 1)}
        return {**case, **({"else": self.schema(0)} if self.random.random() < 0.3 else {})}

    def an_array(self, depth):
        schema = {"type": "array", "maxItems": 4}
        choices = {
            "items": lambda: self.schema(depth - 1),
            "contains": lambda: self.schema(depth - 1),
            "prefixItems": lambda: [self.schema(depth - 1)],
            "minItems": lambda: self.random.randint(0, 2),
            "uniqueItems": lambda: self.random.random() < 0.8,
            "minContains": lambda: self.random.randint(0, 2),
            "maxContains": lambda: self.random.randint(1, 3),
        }
        for keyword in self.some(*choices, odds=0.35):
            schema[keyword] = choices[keyword]()
        return schema

    def some(self, *items, odds=0.5):
        return [item for item in items if self.random.random() < odds]


def walked(matcher, rng):
    """A text that the grammar calls complete; None if the walk is too long."""
    text = bytearray()
    while len(text) < LIMIT:
        if matcher.is_stopped():
            return bytes(text)
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: END + 1]).tolist()
        assert allowed, f"no way on after {bytes(text)!r}"
        choices = [token_id for token_id in allowed if token_id in LIKELY] or allowed
        closing = [token_id for token_id in CLOSING if token_id in allowed]
        if closing and rng.random() < (0.4 if len(text) < 40 else 0.95):
            choices = closing[:1]
        token_id = int(rng.choice(choices if rng.random() < 0.95 else allowed))
        if token_id == END:
            return bytes(text)
        matcher.consume_token(token_id)
        text.append(token_id)
    return None


@pytest.mark.parametrize("group", range(4))
def test_every_complete_text_of_a_random_schema_is_valid(group):
    num_valid = num_served = 0
    for seed in range(60 * group, 60 * (group + 1)):
        schema = {**Schemas(seed).schema(2), "$defs": DEFINITIONS}
        grammar = Grammar.of_json_schema(schema, strict=True)
        try:
            source = grammar_source(grammar, GrammarLimits())
            matcher = build_matcher(source, BYTES, GrammarLimits())
        except (RequestError, Refusal):
            continue
        num_served += 1
        validator = Draft202012Validator(schema)
        rng = np.random.default_rng(seed)
        for _ in range(4):
            text = walked(matcher.deep_copy(), rng)
            if text is not None:
                assert validator.is_valid(json.loads(text)), (schema, text)
                num_valid += 1
    assert num_served >= 25 and num_valid >= 80
