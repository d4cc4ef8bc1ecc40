"""Stop strings against a one-shot reference over the whole text."""

from __future__ import annotations

from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from quickstep.text.output_text import StopStrings


def one_shot(deltas, stops, include, first_active):
    """Grow the text a character at a time; it is over once it ends with a stop."""
    text = ""
    for number, delta in enumerate(deltas):
        for char in delta:
            text += char
            ended = [stop for stop in stops if text.endswith(stop)]
            if ended and number >= first_active:
                stop = max(ended, key=len)
                return (text if include else text[: -len(stop)]), stop
    return text, None


def streamed(deltas, stops, include, first_active):
    watch = StopStrings(stops, include)
    shown = []
    for number, delta in enumerate(deltas):
        match = watch.feed(delta, may_stop=number >= first_active)
        shown.append(match.text)
        if match.stop is not None:
            return shown, match.stop
    return [*shown, watch.finish()], None


texts = st.text(alphabet="ab", max_size=4)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3)


@examples(150)
@given(st.lists(texts, max_size=8), stop_lists, st.booleans(), st.integers(0, 4))
def test_any_split_gives_what_the_whole_text_gives(deltas, stops, include, first_active):
    shown, stop = streamed(deltas, stops, include, first_active)
    assert ("".join(shown), stop) == one_shot(deltas, stops, include, first_active)


@examples(100)
@given(st.lists(texts, max_size=8), stop_lists)
def test_nothing_shown_is_ever_taken_back_or_later_than_needed(deltas, stops):
    """After each delta exactly the undecided end is missing: no more, no less."""
    watch = StopStrings(stops)
    text = shown = ""
    for delta in deltas:
        match = watch.feed(delta)
        text, shown = text + delta, shown + match.text
        if match.stop is not None:
            return
        ends = [text[len(text) - n :] for n in range(len(text) + 1)]
        undecided = max(
            (end for end in ends if any(s.startswith(end) and s != end for s in stops)),
            key=len,
            default="",
        )
        assert text == shown + undecided


def test_a_stop_inside_one_delta_cuts_what_follows_it():
    assert streamed(["hello STOP world"], ["STOP"], False, 0) == (["hello "], "STOP")


def test_a_stop_over_three_deltas_never_shows_its_beginning():
    shown, stop = streamed(["one\n", "\nU", "ser:"], ["\n\nUser:"], False, 0)
    assert (shown, stop) == (["one", "", ""], "\n\nUser:")


def test_a_false_beginning_is_shown_once_it_is_decided():
    assert streamed(["a#", "#b", "c"], ["###"], False, 0) == (["a", "##b", "c", ""], None)


def test_the_first_completed_stop_wins_whatever_the_order_of_the_list():
    assert streamed(["xabcd"], ["abcd", "bc"], False, 0) == (["xa"], "bc")
    assert streamed(["xabc"], ["bc", "abc"], False, 0) == (["x"], "abc")


def test_the_stop_is_kept_on_request():
    assert streamed(["a.", " b"], ["."], True, 0) == (["a."], ".")


def test_a_stop_that_was_complete_too_early_does_not_end_a_later_text():
    assert streamed(["ab", "c"], ["ab"], False, 1) == (["ab", "c", ""], None)


def test_held_text_comes_out_at_the_end():
    assert streamed(["end of li", "ne\n"], ["\n\n"], False, 0)[0][-1] == "\n"
