"""Patterns of JSON schemas in Rust's syntax: the same texts match, whatever is written out."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quickstep.text.grammar.patterns import PatternWriter, in_rust

CODE_POINT = re.compile(r"\\x\{([0-9a-f]+)\}")


def finds(pattern: str, text: str) -> bool:
    """Whether Rust's pattern matches, by Python's engine, whose `$` differs at a line end."""
    plain = CODE_POINT.sub(lambda found: f"\\U{int(found[1], 16):08x}", pattern)
    plain = re.sub(r"(?<!\\)\$$", r"\\Z", plain)
    return re.search(plain, text) is not None


LOOKS = [
    r"^(?!python$)[a-z-_.0-9]+$",
    r"^(?!ab|b$)[a-c]*$",
    r"^(?!a)(?!b)[a-z]",
    r"^(?![i|I][o|O])",
    r"^(?![ \t]*\(a(.*)\))[\s\S]*",
    r"^(a(?:(?!.*--)[ab-]*[ab])?)$",
    r"^([ab]|[ab]([ab-](?!--))*[ab])$",
    r"^((?!ab|bb).)*$",
    r"^(?=!+[^!*\n]+$)(?=(.*a)).+$",
    r"^P(?!$)(\d+Y)?(T(?=\d)(\d+H)?(\d+M)?)?$",
    r"(?!ab)[ab]{2}$",
    r"^a(?=b)(bc|bd)*$",
    r"^(?!a)b|c",
    r"^(?:^a|b)(?!b)[abc]?$",
    r"^(?!^a)(?:b$|c)$",
    r"^(?=a$|b)[ab]+$",
]
TEXTS = st.text(alphabet="abc-!PYTHM12 .(\t", max_size=7) | st.sampled_from(
    ["python", "pythons", "io", "IO", "PT1H", "P1Y", "(a)", "a--b", "!a"]
)


@pytest.mark.parametrize("pattern", LOOKS)
def test_look_ahead_is_written_out(pattern: str) -> None:
    written = PatternWriter().rewritten(pattern)
    one = PatternWriter().common([pattern], [])
    assert one is not None
    for each in (*written, one):
        assert "(?!" not in each and "(?=" not in each

    @given(TEXTS)
    def agree(text: str) -> None:
        expected = re.search(pattern, text) is not None
        assert all(finds(each, text) for each in written) == expected
        assert finds(one, text) == expected

    agree()


BOUNDARIES = [
    r"\b(?:ab|bc)\b",
    r"^\bab*\b",
    r"a\b",
    r"^(a|b)?\b c",
    r"\b",
    r"a\Bb",
    r"^\B-",
    r"a*\bc*",
    r"^[a.]*\b[.b]+\b[a-]*$",
    r"ab\b|\bca",
    r"^[-a-c.]{1,256}\.[a-c()]{1,6}\b([-a-c.]*)$",
    r"\ba\b-\bb\b",
    r"[\b]\bc",
]


@pytest.mark.parametrize("pattern", BOUNDARIES)
def test_word_boundaries_are_written_out(pattern: str) -> None:
    [written] = PatternWriter().rewritten(pattern)
    assert "\\b" not in written and "\\B" not in written

    @given(st.text(alphabet="abc-. ()\b", max_size=8))
    def agree(text: str) -> None:
        assert finds(written, text) == (re.search(pattern, text) is not None)

    @given(st.text(alphabet="ab-\u00e9", max_size=5))
    def no_engine_differs(text: str) -> None:
        for flags in (0, re.ASCII):
            assert not finds(written, text) or re.search(pattern, text, flags)

    agree()
    no_engine_differs()


@pytest.mark.parametrize(
    "pattern", [r"a(\bb|c)", r"a(?=b)\bc", r"\b" * 7, r"^a\b(?:^b|c)", r"a\b\b"]
)
def test_boundaries_in_other_places_are_left_as_they_are(pattern: str) -> None:
    assert PatternWriter().rewritten(pattern) == (pattern,)


ATOMS = st.sampled_from(["a", "b", "[ab]", "[^a]", r"\d", r"\w", ".", r"\-", "(?:ab|b)", "(a|)"])
PIECES = st.builds(lambda atom, times: atom + times, ATOMS, st.sampled_from(["", "*", "?", "{2}"]))
PATTERNS = st.builds(
    lambda start, pieces, end: start + "".join(pieces) + end,
    st.sampled_from(["", "^", "^^", "^(?:^a|b)"]),
    st.lists(PIECES, min_size=1, max_size=4),
    st.sampled_from(["", "$", "$$", "(a$|b)$"]),
)


@pytest.mark.parametrize(
    "pattern", [r"^a$", r"a", r"(?:ab|b)\d*$", r"^(?:^a|b)[ab]{2}", r"\w(a$|b)$"]
)
def test_a_short_pattern_has_another_one(pattern: str) -> None:
    assert PatternWriter().other(pattern) is not None


@given(PATTERNS, st.text(alphabet="ab-1", max_size=6))
def test_another_pattern_matches_what_a_pattern_does_not(pattern: str, text: str) -> None:
    other = PatternWriter().other(pattern)
    assume(other is not None)  # it may be too long
    assert other is not None
    matches = re.search(pattern, text) is not None
    assert (bool(other) and finds(other, text)) != matches


@given(PATTERNS, PATTERNS, st.text(alphabet="ab-1", max_size=6))
def test_a_common_pattern_is_the_intersection(first: str, second: str, text: str) -> None:
    writer = PatternWriter()
    both, first_only = writer.common([first, second], []), writer.common([first], [second])
    assume(both is not None and first_only is not None)  # it may be too long
    assert both is not None and first_only is not None
    in_first, in_second = (re.search(pattern, text) is not None for pattern in (first, second))
    assert (bool(both) and finds(both, text)) == (in_first and in_second)
    assert (bool(first_only) and finds(first_only, text)) == (in_first and not in_second)


@pytest.mark.parametrize("pattern", [r"^\w$", r"^\d$", "^.$", r"^\s$", "^a$", "^[^a]$", r"^\S$"])
@pytest.mark.parametrize("text", ["é", "٣", "\n", "\r", "\u2028", "\u00a0", "a\n"])
def test_no_text_is_written_on_which_engines_differ(pattern: str, text: str) -> None:
    """Python's `\\w` and `\\d` are those of Unicode, and its `$` is also before a last line end."""
    other = PatternWriter().other(pattern)
    assert other is not None
    assert not (finds(other, text) and re.search(pattern, text))


@pytest.mark.parametrize(
    ("pattern", "rust"),
    [
        (r"\${{.*}}", r"\$\{\{.*\}\}"),
        ("a{2}b{1,}c{,3}", r"a{2}b{1,}c\{,3\}"),
        ("[[]&&[a&&b]", r"[\[]&&[a\&&b]"),
        ("[^]", r"[\s\S]"),
        (r"\x{41}[\]{]", r"\x{41}[\]{]"),
        ("^^(?:^a)", "^(?:a)"),
        ("^a|^b", "^a|^b"),
    ],
)
def test_what_rust_reads_in_another_way_is_escaped(pattern: str, rust: str) -> None:
    assert in_rust(pattern) == rust
    assert in_rust(rust) == rust


@pytest.mark.parametrize(
    "pattern",
    [
        r"\bab",
        r"(a)\1",
        "(?<=a)b",
        r"\p{L}",
        "(?i)a",
        "[b-a]",
        "a)",
        "(a",
        "a**",
        "[a",
    ],
)
def test_what_is_not_read_is_left_as_it_is(pattern: str) -> None:
    assert PatternWriter().common([pattern], []) is None
    assert PatternWriter().other(pattern) is None
    looking = f"^a(?!{pattern})b"
    assert PatternWriter().rewritten(looking) == (looking,)


@pytest.mark.parametrize(
    "pattern", ["(?:a|b)*a(?:a|b){12}$", "a{999}", "(" * 5000 + ")" * 5000, r"^[-a]{0,49}a$"]
)
def test_work_is_bounded(pattern: str) -> None:
    assert len(PatternWriter().other(pattern) or "") <= 2**14


def test_no_text_may_be_left() -> None:
    assert PatternWriter().other("") == PatternWriter().other(r"^[\s\S]*") == ""
    assert PatternWriter().common(["^a$"], ["^[a-c]"]) == ""


@given(st.text(alphabet="ab()[]{}^$|?*+\\-.!=:,1dwx", max_size=12), st.text("ab-1", max_size=4))
def test_any_text_is_a_pattern_that_is_read_as_pythons_or_not_at_all(
    pattern: str, text: str
) -> None:
    written = PatternWriter().common([pattern], [])
    assume(written is not None)
    try:
        expected = re.search(pattern, text) is not None
    except re.error:
        return
    assert written is not None
    assert (bool(written) and finds(written, text)) == expected


def test_the_work_of_a_pattern_is_counted_once() -> None:
    steps: list[int] = []
    writer = PatternWriter(steps.append)
    for _ in range(2):
        writer.other("^(?:a|b)*a(?:a|b){5}$")
        writer.rewritten("^plain$")
    assert len(steps) == 1 and steps[0] > 10


def test_an_anchor_that_may_be_read_twice_is_not_read() -> None:
    assert PatternWriter().common(["(^|a)^b"], []) is None
    assert PatternWriter().common(["(a|$)(b|$)"], []) is None
    assert PatternWriter().common(["^a\n^b"], []) == ""
    assert PatternWriter().common(["^(?:^ab?)+$"], []) == PatternWriter().common(["^ab?$"], [])
