"""A schema in llguidance's keywords: what restricts nothing goes, what it lacks is written out."""

from __future__ import annotations

import json
import re

import pytest

from quickstep.errors import RequestError
from quickstep.text.grammar.json_schema import for_llguidance, reference_depth
from quickstep.text.grammar.schema_logic import SchemaLogic, other_texts
from quickstep.text.grammar.schema_numbers import exact_float


def rewritten(schema):
    return for_llguidance(schema).schema


def test_only_unknown_formats_of_schemas_are_left_out():
    schema = {
        "type": "object",
        "format": "rhyme",
        "properties": {
            "format": {"type": "string", "format": "path"},
            "when": {"anyOf": [{"format": "uuid"}, {"format": "moon"}]},
        },
        "$defs": {"not": {"enum": [{"format": "path"}]}},
        "default": {"format": "path"},
        "required": ["format"],
    }
    assert rewritten(schema) == {
        "type": "object",
        "properties": {
            "format": {"type": "string"},
            "when": {"anyOf": [{"format": "uuid"}, {}]},
        },
        "$defs": {"not": {"enum": [{"format": "path"}]}},
        "default": {"format": "path"},
        "required": ["format"],
    }


def test_what_cannot_be_written_out_is_left_to_be_refused():
    for schema in (
        {"not": {"type": "string", "format": "email"}},
        {"not": {"multipleOf": 3}},
        {"not": {"$ref": "#/$defs/t"}, "$defs": {"t": {"items": {"$ref": "#/$defs/t"}}}},
        {"dependencies": {"a": 1}},
        {"propertyNames": {"pattern": r"(\bab|c)"}, "patternProperties": {"a": {}}},
        {"if": {"pattern": r"(\ba+|c)"}, "then": {"minLength": 9}},
        {"propertyNames": {"format": "email"}},
        {"contains": {"multipleOf": 2}, "maxContains": 1},
        {"allOf": [{"minLength": 1}], "unevaluatedProperties": False},
    ):
        assert rewritten(schema) == schema


NEUTRAL = [
    {"uniqueItems": False},
    {"unevaluatedProperties": True},
    {"unevaluatedProperties": {}},
    {"unevaluatedItems": True},
    {"propertyNames": {}},
    {"propertyNames": {"type": "string"}},
    {"propertyNames": True},
    {"contains": {"const": 2}, "minContains": 0},
    {"minContains": 3},
    {"maxContains": 3},
    {"not": False},
    {"not": {"not": {}}},
    {"if": {"type": "string"}},
    {"if": {"type": "string"}, "then": {}, "else": True},
    {"then": {"type": "string"}},
    {"else": False},
    {"dependencies": {}},
    {"dependentRequired": {}},
    {"format": "rhyme"},
    {"deprecated": True},
    {"contentSchema": {"type": "string"}},
    {"type": "string", "uniqueItems": True, "contains": {}, "propertyNames": {"pattern": "a"}},
    {"type": "array", "unevaluatedProperties": False, "dependentRequired": {"a": ["b"]}},
    {"type": ["array", "null"], "maxItems": 1, "uniqueItems": True},
]


@pytest.mark.parametrize("schema", NEUTRAL)
def test_a_keyword_that_restricts_nothing_goes(schema):
    left = {"type", "maxItems"}
    found = for_llguidance({"properties": {"a": schema}})
    assert set(found.schema["properties"]["a"]) <= left
    assert not found.loosened


def test_unevaluated_is_additional_where_no_other_schema_applies():
    schema = {"properties": {"a": {}}, "unevaluatedProperties": False}
    assert rewritten(schema) == {"properties": {"a": {}}, "additionalProperties": False}
    schema = {"additionalProperties": {"type": "null"}, "unevaluatedProperties": False}
    assert rewritten(schema) == {"additionalProperties": {"type": "null"}}


BIG = 1357924680135792469


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (f'{{"const": {BIG}}}', str(BIG)),
        (f'{{"enum": ["a", {{"b": [{2**53 + 1}]}}]}}', str(2**53 + 1)),
        (f'{{"items": {{"properties": {{"id": {{"const": -{BIG}}}}}}}}}', str(-BIG)),
        ('{"const": 0.1234567890123456789}', "0.1234567890123456789"),
        ('{"const": 1e400}', "1e400"),
        ('{"enum": [123456789012345678e-3]}', "123456789012345678e-3"),
        ('{"minimum": 0.1234567890123456789}', "0.1234567890123456789"),
        ('{"multipleOf": 9007199254740993}', "9007199254740993"),
        ('{"type": "integer", "minimum": 10000000000000000000}', "10000000000000000000"),
    ],
)
def test_a_number_that_cannot_be_exact_is_refused_by_its_digits(text, number):
    schema = json.JSONDecoder(parse_float=exact_float).decode(text)
    with pytest.raises(RequestError, match=re.escape(f"grammar has the number {number} in ")):
        for_llguidance(schema)


def test_a_number_that_matters_nowhere_may_have_any_digits():
    schema = {"type": "integer", "default": BIG, "examples": [BIG], "title": str(BIG)}
    assert rewritten(schema) == schema
    exact = {"enum": [2**53, 2**60, 1e22, 0.1, -1.5e-7]}
    assert rewritten(exact) == exact


@pytest.mark.parametrize("bound", [2**53 + 1, 2**62 + 1, 2**63 - 1, 2**64 - 1, 10**30, 1e300])
def test_a_bound_is_moved_to_a_double_inside_the_range(bound):
    for keyword, name in (("maximum", "number"), ("exclusiveMaximum", "integer")):
        found = rewritten({"type": name, keyword: bound})
        [moved] = [value for key, value in found.items() if key != "type"]
        assert moved <= bound and (moved == 2**63 - 1 or float(moved) == moved)
    found = rewritten({"type": "integer", "minimum": -bound})
    assert found["minimum"] >= -bound and float(found["minimum"]) == found["minimum"]


@pytest.mark.parametrize(
    "texts",
    [["a"], ["a", "ab", "b"], ["", "x"], ["a.b", "a\\", '"', "é", "\n"], ["abc", "abd", "b"]],
)
def test_a_pattern_of_other_texts_fits_all_but_these(texts):
    pattern = re.sub(
        r"\\x\{([0-9a-f]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", other_texts(texts)
    )
    near = {text[:n] + more for text in texts for n in range(len(text) + 1) for more in ("", "q")}
    for text in {*texts, *near, "zz", "\n"}:
        assert (re.fullmatch(pattern[1:-1], text) is None) == (text in texts)


DISJOINT = [
    ({"type": "string"}, {"type": ["integer", "null"]}),
    ({"enum": [1, "a"]}, {"enum": [2, "b", 1.5]}),
    (
        {"required": ["k"], "properties": {"k": {"const": "a"}}, "type": "object"},
        {"$ref": "#/$defs/b"},
    ),
    ({"type": "object", "required": ["x"]}, {"type": "object", "additionalProperties": False}),
    ({"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}),
    ({"anyOf": [{"const": 1}, {"type": "null"}]}, {"type": "string"}),
    ({"allOf": [{"$ref": "#/$defs/b"}]}, {"type": "object", "properties": {"k": {"const": "a"}}}),
]
ROOT = {"$defs": {"b": {"type": "object", "required": ["k"], "properties": {"k": {"const": "b"}}}}}


@pytest.mark.parametrize(("first", "second"), DISJOINT)
def test_branches_that_no_value_fits_both_of_are_known(first, second):
    for one, other in ((first, second), (second, first)):
        assert SchemaLogic(ROOT).are_disjoint(one, other)
        found = for_llguidance({**ROOT, "oneOf": [one, other]})
        assert found.schema["anyOf"] == [one, other] and not found.loosened
    assert not SchemaLogic(ROOT).are_disjoint(first, first)
    assert not SchemaLogic(ROOT).are_disjoint(first, {})


def test_many_branches_with_values_of_their_own_are_exclusive():
    def tagged(n):
        return {"type": "object", "required": ["x", "kind"], "properties": {"kind": {"const": n}}}

    definitions = {f"d{n}": tagged(n) for n in range(500)}
    references = [{"$ref": f"#/$defs/d{n}"} for n in range(500)]
    for branches in ([{"const": n, "title": "t"} for n in range(500)], references):
        found = for_llguidance({"$defs": definitions, "oneOf": branches})
        assert found.schema["anyOf"] == branches and not found.loosened
    twice = [*references, {"$ref": "#/$defs/d1"}]
    assert for_llguidance({"$defs": definitions, "oneOf": twice}).loosened == {"oneOf"}


def test_what_may_be_loosened_is_reported():
    overlapping = {
        "oneOf": [{"type": "string", "pattern": r"\ba"}, {"type": "string", "pattern": r"\bb"}]
    }
    assert for_llguidance({"items": overlapping}).loosened == {"oneOf"}
    unique = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    assert for_llguidance({"properties": {"a": unique}}).loosened == {"uniqueItems"}


def test_a_reference_to_a_place_that_is_rewritten_finds_its_target():
    schema = {"oneOf": [{"const": 1}, {"type": "array", "items": {"$ref": "#/oneOf/0"}}]}
    found = rewritten(schema)
    assert found["anyOf"][1]["items"] == {"$ref": "#/$defs/quickstep-0"}
    assert found["$defs"] == {"quickstep-0": {"const": 1}}


def test_a_schema_that_grows_too_large_is_loosened_or_refused():
    many = [
        {"minLength": n, "properties": {f"a{m}": {"minimum": n} for m in range(40)}}
        for n in range(16)
    ]
    assert for_llguidance({"items": {"oneOf": many}}).loosened == {"oneOf"}
    links = [{"$ref": f"#/$defs/d{n}"} for n in range(15)]
    deep = {
        f"d{n}": {"if": links[n + 1], "then": {"not": links[n + 1]}, "else": links[n + 1]}
        for n in range(14)
    }
    with pytest.raises(RequestError, match="too large once its not, if and oneOf"):
        for_llguidance({"not": links[0], "$defs": {**deep, "d14": {"type": "string"}}})


def test_all_of_is_extended_and_not_replaced():
    schema = {"allOf": [{"type": "object"}], "not": {"required": ["a"]}, "dependencies": {}}
    assert rewritten(schema) == {
        "allOf": [
            {"type": "object"},
            {"type": "object", "properties": {"a": False}},
        ]
    }


def test_references_count_as_deep_as_they_are_followed():
    flat = {f"d{i}": {"type": "null"} for i in range(100)}
    wide = {"anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(100)], "$defs": flat}
    assert reference_depth(wide, 1000) < 10
    links = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(100)}
    assert reference_depth({"$ref": "#/$defs/d0", "$defs": links}, 1000) > 200
    assert reference_depth({"$ref": "#/$defs/d0", "$defs": links}, 50) == 51


def test_references_in_circles_and_to_nowhere_end():
    for target in ("#", "#/$defs/a", "#/x/1/y", "#anchor", "http://example.com/x", "#/$defs/a~1b"):
        schema = {"properties": {"a": {"$ref": target}}, "$defs": {"a": {"$ref": "#"}}}
        assert reference_depth(schema, 1000) < 10


@pytest.mark.parametrize(
    ("named", "known"),
    [
        ("http://json-schema-org/draft-07/schema#", "http://json-schema.org/draft-07/schema#"),
        ("https://json-schema.org/draft-04/schema", "http://json-schema.org/draft-04/schema#"),
        ("http://json-schema.org/draft-05/schema#", "http://json-schema.org/draft-04/schema#"),
        (
            "http://json-schema.org/draft/2019-09/schema#",
            "https://json-schema.org/draft/2019-09/schema",
        ),
        ("http://json-schema.org/schema#", None),
        ("https://example.com/of-mine", "https://example.com/of-mine"),
    ],
)
def test_a_draft_is_known_by_all_spellings_of_its_name(named, known):
    inner = {"type": "object", "$schema": named}
    found = rewritten({**inner, "properties": {"a": inner}})
    assert found.get("$schema") == found["properties"]["a"].get("$schema") == known


def test_a_definition_may_have_any_name():
    name = "A<B, c|d>"
    schema = {"$ref": f"#/definitions/{name}", "definitions": {name: {"type": "null"}}}
    found = rewritten(schema)
    moved = found["$ref"].removeprefix("#/$defs/")
    assert re.fullmatch("[a-z0-9-]+", moved) and found["$defs"][moved] == {"type": "null"}


def case(value, then, **more):
    return {"if": {"properties": {"t": {"const": value}}, **more}, "then": {"required": [then]}}


def test_conditions_on_one_property_are_cases_and_not_combinations():
    schema = {
        "type": "object",
        "required": ["t"],
        "properties": {"t": {"enum": [*range(40)]}},
        "allOf": [{"maxProperties": 9}, *(case(number, f"p{number}") for number in range(40))],
    }
    kept, cases = rewritten(schema)["allOf"]
    assert kept == {"maxProperties": 9}
    assert len(cases["anyOf"]) == 40
    assert cases["anyOf"][7]["allOf"] == [{"required": ["p7"]}]


def test_a_case_without_the_property_or_without_an_object_is_one_too():
    schema = {"allOf": [case(1, "p"), case(2, "q", required=["t"]), case(1, "r", type="object")]}
    ((cases,),) = (rewritten(schema)["allOf"],)
    first, second, other, absent, no_object = cases["anyOf"]
    assert first["properties"] == {"t": {"enum": [1]}}
    assert first["allOf"] == [{"required": ["p"]}, {"required": ["r"]}]
    assert second["allOf"] == [{"required": ["q"]}]
    assert "allOf" not in other
    assert absent["properties"] == {"t": False}
    assert absent["allOf"] == [{"required": ["p"]}, {"required": ["r"]}]
    assert "object" not in no_object["type"]
    # what is no object has no properties, and the condition without a type holds for it
    assert no_object["allOf"] == [{"required": ["p"]}, {"required": ["q"]}]


def test_patterns_of_properties_do_not_overlap():
    schema = {"patternProperties": {"^a": {"minimum": 1}, "b$": {"maximum": 9}}}
    found = rewritten(schema)["patternProperties"]
    assert list(found.values()) == [
        {"minimum": 1},
        {"maximum": 9},
        {"allOf": [{"minimum": 1}, {"maximum": 9}]},
    ]
    apart = {"^a": {"minimum": 1}, "^b": {"maximum": 9}}
    assert rewritten({"patternProperties": apart})["patternProperties"] == apart


def test_a_pattern_that_no_text_matches_allows_no_text():
    found = rewritten({"pattern": "^(?:a\n^b)$"})
    assert "pattern" not in found and "string" not in found["allOf"][0]["type"]


def test_what_is_next_to_a_reference_in_a_circle_is_part_of_its_target():
    tree = {"type": "object", "additionalProperties": {"$ref": "#/$defs/t"}}
    place = {"minProperties": 1, "anyOf": [{"type": "string"}, {"$ref": "#/$defs/t"}]}
    tree["additionalProperties"] = place
    schema = {"$defs": {"t": tree}, "properties": {"a": place}}
    found = for_llguidance(schema, merges_references=True).schema
    *_, reference = found["properties"]["a"]["anyOf"]
    merged = found["$defs"][reference["$ref"].removeprefix("#/$defs/")]
    assert merged["minProperties"] == 1
    assert merged["additionalProperties"]["anyOf"][-1] == reference


@pytest.mark.parametrize("form", ["sibling", "allOf"])
def test_a_reference_in_a_circle_keeps_what_is_next_to_it(form):
    tree = {"type": "object", "additionalProperties": {"$ref": "#/$defs/t"}}
    reference = {"$ref": "#/$defs/t"}
    bound = {"minProperties": 1}
    place = {**reference, **bound} if form == "sibling" else {"allOf": [reference], **bound}
    found = for_llguidance({"$defs": {"t": tree}, "properties": {"a": place}}, False, True).schema
    merged = found["$defs"][found["properties"]["a"]["$ref"].removeprefix("#/$defs/")]
    assert merged["minProperties"] == 1
    assert merged["additionalProperties"] == reference
    assert "minProperties" not in found["$defs"]["t"]


def test_an_id_that_is_a_fragment_does_not_move_the_root():
    two = {"$id": "#/properties/a", "const": 2}
    schema = {"properties": {"a": two}, "not": {"$ref": "#/properties/a"}}
    assert "not" not in rewritten(schema)
    elsewhere = {**two, "$id": "https://example.com/a"}
    assert "not" in rewritten({**schema, "properties": {"a": elsewhere}})


def test_names_have_a_pattern_a_length_and_other_patterns():
    names = {"pattern": "^[a-c]+$", "maxLength": 2, "examples": ["a"]}
    assert rewritten({"propertyNames": names})["patternProperties"] == {"^[a-c]{1,2}$": True}
    assert rewritten({"propertyNames": {"format": "regex", "title": "t"}}) == {}
    both = rewritten(
        {
            "propertyNames": {"pattern": "^[ab]*$"},
            "patternProperties": {"^a": {"minimum": 1}, "c": {"maximum": 9}},
        }
    )
    first, rest = both["patternProperties"].items()
    assert first[1] == {"minimum": 1} and re.search(first[0], "ab") and not re.search(first[0], "b")
    assert rest[1] is True and re.search(rest[0], "b") and not re.search(rest[0], "ab")


def test_a_closed_object_keeps_what_patterns_say_of_its_properties():
    schema = {
        "type": "object",
        "properties": {"a": {"minimum": 1}},
        "patternProperties": {"^a": {"maximum": 9}},
        "maxProperties": 1,
    }
    assert rewritten(schema)["properties"] == {"a": {"allOf": [{"minimum": 1}, {"maximum": 9}]}}


@pytest.mark.parametrize(
    ("schema", "keyword", "wanted"),
    [
        ({"dependentRequired": [["a"]]}, "dependentRequired", "object"),
        ({"properties": [{}], "required": []}, "properties", "object"),
        ({"items": {"required": [{}]}}, "required", "list of names"),
        ({"anyOf": [{"type": 3}]}, "type", "name or list of names"),
        ({"allOf": {}}, "allOf", "list"),
        ({"not": None}, "not", "schema"),
        ({"minimum": "1"}, "minimum", "number"),
        ({"$defs": {"a": {"maxLength": True}}}, "maxLength", "number"),
        ({"patternProperties": {"a": {"pattern": 1}}}, "pattern", "text"),
        ({"$ref": "#/x/y", "x": {"y": {"enum": 1}}}, "enum", "list"),
        ({"propertyNames": {"$ref": 7}}, "$ref", "text"),
    ],
)
def test_a_keyword_of_the_wrong_type_is_named(schema, keyword, wanted):
    with pytest.raises(RequestError, match=re.escape(f"whose {keyword} is no {wanted}")):
        rewritten(schema)


def test_what_is_no_schema_is_left_as_it_is():
    data = {"pattern": 7, "uniqueItems": False, "not": 3}
    schema = {"x-of-mine": data, "examples": [data], "properties": {"pattern": {"x": [data]}}}
    assert rewritten(schema) == schema


@pytest.mark.parametrize("keyword", ["id", "$id"])
@pytest.mark.parametrize("end", ["", "#"])
def test_a_reference_by_the_schemas_own_name_is_to_its_root(keyword: str, end: str) -> None:
    name = "https://example.com/tree"
    schema = {keyword: f"{name}#", "items": {"$ref": f"{name}{end}"}}
    assert for_llguidance(schema).schema["items"] == {"$ref": "#"}


DRAFT_3 = {"$schema": "http://json-schema.org/draft-03/schema#"}


def test_properties_of_draft_3_say_themselves_that_they_are_required() -> None:
    inner = {"type": "object", "properties": {"c": {"type": "null", "required": True}}}
    properties = {"a": {**inner, "required": True}, "b": {"type": "null", "required": False}}
    found = for_llguidance({**DRAFT_3, "type": "object", "properties": properties}).schema
    assert found["required"] == ["a"]
    assert found["properties"]["a"]["required"] == ["c"]
    assert found["properties"]["b"] == {"type": "null"}


@pytest.mark.parametrize("keyword", ["extends", "disallow", "divisibleBy"])
def test_what_only_draft_3_has_is_refused_by_name(keyword: str) -> None:
    with pytest.raises(RequestError, match=f"has {keyword} of JSON Schema's draft 3"):
        for_llguidance({**DRAFT_3, "items": {keyword: {}}})
