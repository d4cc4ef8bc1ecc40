"""A schema in llguidance's words: formats that are annotations go, everything else stays."""

from __future__ import annotations

from quickstep.engine.grammar.json_schema import for_llguidance, reference_depth


def test_only_unknown_formats_of_schemas_are_left_out():
    schema = {
        "type": "object",
        "format": "rhyme",
        "properties": {
            "format": {"type": "string", "format": "path"},
            "when": {"anyOf": [{"format": "date-time"}, {"format": "moon"}]},
        },
        "$defs": {"not": {"enum": [{"format": "path"}]}},
        "default": {"format": "path"},
        "required": ["format"],
    }
    assert for_llguidance(schema) == {
        "type": "object",
        "properties": {
            "format": {"type": "string"},
            "when": {"anyOf": [{"format": "date-time"}, {}]},
        },
        "$defs": {"not": {"enum": [{"format": "path"}]}},
        "default": {"format": "path"},
        "required": ["format"],
    }


def test_what_cannot_be_written_out_is_left_to_be_refused():
    for schema in (
        {"not": {"type": "string"}},
        {"not": {"required": []}},
        {"dependencies": {"a": 1}},
        {"dependentRequired": [["a"]]},
        {"dependentSchemas": {name: {} for name in "abcde"}},
        {"if": {}, "then": {}},
        {"uniqueItems": True},
    ):
        assert for_llguidance(schema) == schema


def test_all_of_is_extended_and_not_replaced():
    schema = {"allOf": [{"type": "object"}], "not": {"required": ["a"]}, "dependencies": {}}
    assert for_llguidance(schema) == {
        "allOf": [
            {"type": "object"},
            {"anyOf": [{"type": "object", "properties": {"a": False}}]},
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
