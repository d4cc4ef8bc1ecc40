"""Searches over a vocabulary's joined texts find what a look at each token finds."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from quickstep.text.token_texts import TokenTexts

ALPHABET = st.sampled_from([b"<", b"/", b"t", b"h", b">", b" ", b"\n", "ü".encode(), b"\xc3"])
TOKENS = st.lists(st.lists(ALPHABET, max_size=5).map(b"".join), min_size=1, max_size=40)
TEXTS = st.text(alphabet="</th>ü \n", min_size=1, max_size=4)


@given(tokens=TOKENS, text=TEXTS)
def test_the_tokens_that_hold_a_text_are_found(tokens, text):
    expected = [i for i, token in enumerate(tokens) if text.encode() in token]
    assert TokenTexts(tokens).containing(text.encode()).tolist() == expected


@given(tokens=TOKENS)
def test_a_raw_byte_between_the_texts_is_no_match(tokens):
    tokens = [b"\xff", *tokens, b"th\xff"]
    expected = [i for i, token in enumerate(tokens) if b"th" in token]
    assert TokenTexts(tokens).containing(b"th").tolist() == expected


def may_stand_in(*tags):
    ways = [rb"\A[ \t\n\r]+\Z"]
    for tag in tags:
        size = len(tag)
        inner = {tag[a:b] for a in range(1, size) for b in range(a + 1, size)}
        ways += [re.escape(tag)]
        ways += [re.escape(tag[:end]) + rb"\Z" for end in range(1, size)]
        ways += [rb"\A" + re.escape(tag[start:]) for start in range(1, size)]
        ways += [rb"\A" + re.escape(text) + rb"\Z" for text in inner]
    return re.compile(b"|".join(ways))


@given(tokens=TOKENS, opening=TEXTS, closing=TEXTS)
def test_the_tokens_that_may_hold_a_part_of_a_tag_are_found(tokens, opening, closing):
    tags = opening.encode(), closing.encode()
    is_piece = may_stand_in(*tags)
    expected = [i for i, token in enumerate(tokens) if is_piece.search(token)]
    assert TokenTexts(tokens).within(*tags).tolist() == expected
