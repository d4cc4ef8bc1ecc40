"""JSON lines: one line for every reader, the same value for every parser."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from quickstep.json_line import json_line
from quickstep.server.http.event_stream import data_frame, event_frame

# every character at which some reader ends a line
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


TEXTS = st.text() | st.text(LINE_ENDS)
VALUES = st.recursive(
    TEXTS, lambda each: st.lists(each) | st.dictionaries(TEXTS, each), max_leaves=4
)


@given(VALUES)
def test_json_is_one_line_for_every_reader(value):
    line = json_line(value)
    assert json.loads(line) == value
    assert len(line.decode().splitlines()) == 1
    assert len(line.splitlines()) == 1


def test_events_have_no_line_ends_but_their_own():
    assert data_frame(LINE_ENDS).decode().splitlines() == [
        "data: " + json_line(LINE_ENDS).decode(),
        "",
    ]
    assert len(event_frame("e", {"text": LINE_ENDS}).decode().splitlines()) == 3
