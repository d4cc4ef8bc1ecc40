"""Proposers without a model: what they find, against slow searches, and what they never share."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quickstep.config import ProposerConfig, SpeculationConfig, SpeculationMethod
from quickstep.errors import ConfigError
from quickstep.ops.native import suffix
from quickstep.ops.native.backend import NativeStatus
from quickstep.ops.native.suffix import SuffixDrafts
from quickstep.runtime.speculation import methods
from quickstep.runtime.speculation.methods import open_lookup_proposers
from quickstep.runtime.speculation.ngram import NgramProposer
from quickstep.runtime.speculation.proposer import DraftTask, Proposer
from quickstep.runtime.speculation.static import StaticProposer
from quickstep.runtime.speculation.suffix import RecentOutputs, SuffixProposer
from quickstep.types import Admission, SamplingParams

SMALL_TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)
PHRASE = (11, 12, 13, 14, 15, 16, 17, 18)
KEY = ("", "", "")


def admission(tokens: tuple[int, ...], prompt_len: int | None = None, **fields: str) -> Admission:
    num_prompt = len(tokens) if prompt_len is None else prompt_len
    return Admission(0, "r#0", tokens, num_prompt, SamplingParams(), 0, **fields)


def draft_of(proposer: Proposer, tokens: tuple[int, ...], num_drafts: int = 4) -> tuple[int, ...]:
    """What is proposed after `tokens` in slot 0."""
    proposer.admit(0, admission(tokens))
    [draft] = proposer.propose([DraftTask(0, num_drafts, ())])
    return draft


def finish(proposer: Proposer, outputs: tuple[int, ...], **fields: str) -> None:
    """A sequence in slot 7 that generates `outputs` and ends."""
    proposer.admit(7, admission((1, 2), **fields))
    proposer.observe(7, outputs)
    proposer.release(7)


def searched_ngram(tokens: list[int], num_drafts: int, min_n: int, max_n: int) -> tuple[int, ...]:
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if n < len(tokens) and tokens[end - n : end] == tokens[-n:]:
                text = list(tokens)
                for offset in range(num_drafts):
                    text.append(text[end + offset])
                return tuple(text[len(tokens) :])
    return ()


def searched_suffix(tokens: list[int], num_drafts: int, depth: int) -> tuple[int, ...]:
    """The definition in the docstring of `suffix`, from all substrings of the text."""
    best: tuple[int, ...] = ()
    best_score = 0.0
    for match_len in range(min(depth, len(tokens)), 1, -1):
        suffix = tokens[-match_len:]
        ends = [
            end
            for end in range(len(tokens) - 1, match_len - 1, -1)
            if tokens[end - match_len : end] == suffix
        ]
        draft: list[int] = []
        score, probability = 0.0, 1.0
        while ends and len(draft) < min(num_drafts, match_len):
            text = tokens + draft
            following = [text[end + len(draft)] for end in ends]
            token = max(dict.fromkeys(following), key=following.count)
            probability *= following.count(token) / len(ends)
            if probability < 0.1:
                break
            ends = [end for end, next_ in zip(ends, following, strict=True) if next_ == token]
            draft.append(token)
            score += probability
        if score > best_score:
            best, best_score = tuple(draft), score
    return best


@given(SMALL_TEXTS, st.integers(1, 8), st.integers(1, 3), st.integers(0, 3))
def test_ngram_finds_what_a_search_finds(
    tokens: list[int], num_drafts: int, min_n: int, more: int
) -> None:
    proposer = NgramProposer(min_n, min_n + more)
    expected = searched_ngram(tokens, num_drafts, min_n, min_n + more)
    assert draft_of(proposer, tuple(tokens), num_drafts) == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=32), st.integers(1, 8), st.integers(2, 9))
def test_suffix_finds_what_a_search_of_all_substrings_finds(
    tokens: list[int], num_drafts: int, depth: int
) -> None:
    draft = draft_of(SuffixProposer(max_tree_depth=depth), tuple(tokens), num_drafts)
    assert draft == searched_suffix(tokens, num_drafts, depth)


@pytest.mark.parametrize("kind", [NgramProposer, SuffixProposer])
@given(st.data())
def test_tokens_that_come_one_by_one_give_the_drafts_of_the_complete_text(
    kind: type[NgramProposer] | type[SuffixProposer], data: st.DataObject
) -> None:
    tokens = tuple(data.draw(SMALL_TEXTS))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    proposer = kind()
    proposer.admit(3, admission(tokens[: cuts[0]] if cuts else tokens))
    for start, end in pairwise([*cuts, len(tokens)]):
        if data.draw(st.booleans()):
            proposer.observe(3, tokens[start:end])
        else:
            proposer.propose([DraftTask(3, 2, tokens[start:end])])
    assert proposer.propose([DraftTask(3, 5, ())]) == [draft_of(kind(), tokens, 5)]


@pytest.mark.parametrize("kind", [NgramProposer, SuffixProposer])
def test_a_repeated_phrase_is_drafted_beyond_its_end(
    kind: type[NgramProposer] | type[SuffixProposer],
) -> None:
    assert draft_of(kind(), (1, 2, 3, 1, 2, 3, 1, 2, 3), 6) == (1, 2, 3, 1, 2, 3)


@pytest.mark.parametrize("kind", [NgramProposer, SuffixProposer])
def test_slots_are_apart_and_a_release_empties_one(
    kind: type[NgramProposer] | type[SuffixProposer],
) -> None:
    proposer = kind()
    proposer.admit(0, admission(PHRASE))
    proposer.admit(1, admission(PHRASE[:3]))
    assert proposer.propose([DraftTask(1, 4, ())]) == [()]
    proposer.release(0)
    proposer.release(0)
    proposer.admit(0, admission(PHRASE[:3]))
    assert proposer.propose([DraftTask(0, 4, ())]) == [()]


@pytest.mark.parametrize("kind", [NgramProposer, SuffixProposer])
def test_one_call_indexes_a_bounded_number_of_tokens(
    kind: type[NgramProposer] | type[SuffixProposer],
) -> None:
    proposer = kind(max_indexed_per_call=10)
    tokens = (*range(100, 130), *PHRASE, *PHRASE[:3])
    proposer.admit(0, admission(tokens))
    drafts = [proposer.propose([DraftTask(0, 3, ())])[0] for _ in range(5)]
    assert drafts == [(), (), (), PHRASE[3:6], PHRASE[3:6]]


def test_suffix_prefers_the_continuation_that_is_frequent() -> None:
    text = (5, 6, 7, 1, 5, 6, 8, 1, 5, 6, 8, 2, 9, 5, 6)
    assert draft_of(SuffixProposer(), text, 1) == (8,)
    assert draft_of(NgramProposer(), text, 1) == (8,)
    text = (5, 6, 8, 1, 5, 6, 8, 2, 5, 6, 7, 1, 9, 5, 6)
    assert draft_of(SuffixProposer(), text, 1) == (8,)
    assert draft_of(NgramProposer(), text, 1) == (7,)


def test_a_draft_grows_with_the_match() -> None:
    text = (*PHRASE, 0)
    assert len(draft_of(SuffixProposer(), (*text, *PHRASE[:2]), 8)) == 2
    assert len(draft_of(SuffixProposer(), (*text, *PHRASE[:4]), 8)) == 4
    assert len(draft_of(SuffixProposer(max_spec_factor=2.0), (*text, *PHRASE[:2]), 8)) == 4


def test_an_improbable_draft_ends() -> None:
    text = tuple(token for last in range(20, 40) for token in (5, 6, last))
    assert draft_of(SuffixProposer(), (*text, 5, 6), 4) == ()
    assert draft_of(SuffixProposer(min_token_prob=0.01), (*text, 5, 6), 4) != ()


def test_an_output_that_ended_helps_its_tenant_only() -> None:
    proposer = SuffixProposer()
    finish(proposer, PHRASE, tenant="a", cache_salt="s", adapter="l")
    others: list[dict[str, str]] = [
        {},
        {"tenant": "a", "adapter": "l"},
        {"tenant": "a", "cache_salt": "s"},
        {"tenant": "b", "cache_salt": "s", "adapter": "l"},
        {"tenant": "as", "adapter": "l"},
    ]
    for fields in others:
        proposer.admit(0, admission(PHRASE[:4], **fields))
        assert proposer.propose([DraftTask(0, 4, ())]) == [()]
    proposer.admit(0, admission(PHRASE[:4], tenant="a", cache_salt="s", adapter="l"))
    assert proposer.propose([DraftTask(0, 4, ())]) == [PHRASE[4:]]


def test_a_draft_ends_where_an_output_ended() -> None:
    proposer = SuffixProposer()
    finish(proposer, PHRASE)
    finish(proposer, (*range(50, 60),))
    assert draft_of(proposer, PHRASE[:6], 6) == PHRASE[6:]


def test_a_preempted_sequence_is_added_once() -> None:
    proposer = SuffixProposer()
    proposer.admit(0, admission((1, 2, 3), prompt_len=1))
    proposer.release(0)
    assert draft_of(proposer, (1, 2), 1) == ()


def recent_outputs(max_tokens: int) -> tuple[RecentOutputs, Callable[[int, int], None]]:
    """Recent outputs, and what adds an output of so many tokens for a tenant with this number."""
    new_text = SuffixDrafts(24, 1.0, 0.1, 100).text
    recent = RecentOutputs(max_tokens, new_text)

    def add(tenant: int, num_tokens: int) -> None:
        output = new_text()
        output.append((-7, *range(num_tokens)))  # the first token is of the prompt
        recent.add((str(tenant), "", ""), output, 1)

    return recent, add


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 60)), max_size=60))
def test_recent_outputs_stay_within_their_tokens(outputs: list[tuple[int, int]]) -> None:
    recent, add = recent_outputs(200)
    for tenant, num_tokens in outputs:
        add(tenant, num_tokens)
        held = [recent.of((str(one), "", "")) for one in range(21)]
        assert sum(len(text) for text in held if text) == recent.num_tokens <= 200
        assert all(len(text) <= 25 for text in held if text)


def test_the_tenant_that_was_used_last_stays() -> None:
    recent, add = recent_outputs(80)
    for tenant in range(8):
        add(tenant, 9)
    assert recent.of(("0", "", "")) is not None
    add(8, 9)
    assert recent.of(("0", "", "")) is not None
    assert recent.of(("1", "", "")) is None


def test_long_texts_are_found_again_after_they_have_grown() -> None:
    """A prompt of more pairs than one table holds, searched for phrases all over it."""
    rng = random.Random(5)
    text = [rng.randrange(1000) for _ in range(20_000)]
    proposer = SuffixProposer()
    proposer.admit(0, admission(tuple(text)))
    for start in range(100, 20_000, 1237):
        phrase = text[start : start + 8]
        [draft] = proposer.propose([DraftTask(0, 4, tuple(phrase))])
        assert draft == tuple(text[start + 8 : start + 12])
        text += phrase


def test_a_call_drafts_for_each_of_many_sequences() -> None:
    proposer = SuffixProposer()
    for slot in range(40):
        proposer.admit(slot, admission(tuple(range(slot, slot + 20))))
    slots = [*range(39, -1, -1)]
    tasks = [DraftTask(slot, 1 + slot % 4, (slot + 3, slot + 4, slot + 5)) for slot in slots]
    drafts = proposer.propose(tasks)
    assert drafts == [tuple(range(s + 6, s + 6 + min(3, 1 + s % 4))) for s in slots]
    assert proposer.propose([]) == []


def test_without_the_native_library_auto_looks_up_ngrams(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_names(method: SpeculationMethod) -> list[str]:
        config = SpeculationConfig((ProposerConfig(method),))
        return [one.name for one in open_lookup_proposers(config)]

    assert open_names(SpeculationMethod.AUTO) == ["suffix"]
    missing = NativeStatus(False, "", (), "there is no compiler", "")
    monkeypatch.setattr(methods, "native_status", lambda: missing)
    monkeypatch.setattr(suffix, "native_status", lambda: missing)
    assert open_names(SpeculationMethod.AUTO) == ["ngram"]
    with pytest.raises(ConfigError, match="native library: there is no compiler"):
        open_names(SpeculationMethod.SUFFIX)


def test_static_drafts_follow_the_reference_as_often_as_requested() -> None:
    reference = tuple(range(1000, 3000))
    for acceptance in (0.0, 0.8, 1.0):
        proposer = StaticProposer(lambda _: reference, acceptance, seed=1)
        proposer.admit(0, admission((1, 2, 1000), prompt_len=2))
        proposer.observe(0, (1001,))
        [draft] = proposer.propose([DraftTask(0, 1900, (1002,))])
        right = sum(a == b for a, b in zip(draft, reference[3:1903], strict=True))
        assert abs(right / 1900 - acceptance) <= (0.03 if acceptance == 0.8 else 0.0)
        assert proposer.propose([DraftTask(0, 1900, ())]) == [draft]


def test_static_has_no_draft_after_the_end_of_the_reference() -> None:
    proposer = StaticProposer(lambda _: (0, 7))
    proposer.admit(0, admission((1,)))
    assert proposer.propose([DraftTask(0, 4, ()), DraftTask(0, 4, (0, 7))]) == [(0, 7), ()]


def test_bad_settings_are_refused() -> None:
    for bad in (
        lambda: NgramProposer(0, 3),
        lambda: NgramProposer(4, 3),
        lambda: SuffixProposer(max_tree_depth=1),
        lambda: SuffixProposer(max_spec_factor=0.0),
        lambda: SuffixProposer(min_token_prob=2.0),
        lambda: SuffixProposer(max_cached_tokens=-1),
        lambda: StaticProposer(lambda _: (), acceptance=1.5),
    ):
        with pytest.raises(ConfigError):
            bad()
