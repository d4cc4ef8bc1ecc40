"""An answer in channels is brought to its end: out of free text, through the end marker."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_checkpoint
from grammar_sampling import PROMPT
from tokenizers import AddedToken

from quickstep.runtime.sampling.closing_search import ClosingSearch
from quickstep.runtime.sampling.sampler import Sample, sample_row
from quickstep.runtime.sampling.state import SamplingState
from quickstep.sampling_params import TokenForms
from quickstep.text.grammar.grammars import GrammarCompiler
from quickstep.text.tokenizer import Tokenizer
from quickstep.text.tool_calls.answer_grammar import answer_grammar
from quickstep.text.tool_calls.formats import TOOL_CALL_FORMATS, message_grammar
from quickstep.text.tool_calls.harmony import HARMONY_MARKERS, HARMONY_SPELLING
from quickstep.text.tool_calls.reader import MessageParser
from quickstep.types import Admission, Grammar, SamplingParams

VOCAB = 280
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": "array", "items": {"type": "number"}, "minItems": 2},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
ANSWERS = {
    "schema": Grammar.of_json_schema(SCHEMA),
    "object": Grammar.of_json_object(),
    "choice": Grammar.of_choice(["yes", "no"]),
}


def tokenizer_with_markers() -> Tokenizer:
    """A tokenizer over bytes whose markers are special tokens, as gpt-oss has them."""
    library = tiny_checkpoint._library()
    library.add_special_tokens([AddedToken(text, special=True) for text in HARMONY_MARKERS])
    return Tokenizer(library, [library.token_to_id("<|return|>")])


TOKENIZER = tokenizer_with_markers()
COMPILER = GrammarCompiler(TOKENIZER, VOCAB)
MARKERS = [TOKENIZER.token_id(text) for text in HARMONY_MARKERS]


def grammar_of(answer):
    return answer_grammar(HARMONY_SPELLING, [], False, TOKENIZER.token_id, answer)


def thinking(grammar, limit, seed, channel="analysis"):
    """What a model writes that thinks for ever: its text, and whether the end token came."""
    COMPILER.compile(grammar)
    params = SamplingParams(
        grammar=grammar, max_tokens=limit, in_tokens=TokenForms(max_tokens=limit)
    )
    ends = TOKENIZER.eos_token_ids
    admission = Admission(0, "r#0", PROMPT, len(PROMPT), params, seed, ends)
    state = SamplingState(admission, VOCAB, COMPILER.new_matcher)
    header = TOKENIZER.encode(f"<|channel|>{channel}<|message|>", add_special_tokens=False)
    tokens: list[int] = []
    while len(tokens) < limit:
        row = np.random.default_rng((seed, len(tokens))).normal(size=VOCAB).astype(np.float32)
        row[MARKERS] -= 30
        if len(tokens) < len(header):
            row[header[len(tokens)]] += 100
        sample = sample_row(row, state)
        assert isinstance(sample, Sample), sample
        if sample.token_id in ends:
            return tokens, True
        tokens.append(sample.token_id)
        state.record(sample.token_id)
    return tokens, False


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("channel", ["analysis", "commentary"])
@pytest.mark.parametrize("limit", [60, 140])
def test_endless_reasoning_in_a_channel_leaves_room_for_the_answer(answer, channel, limit):
    grammar = grammar_of(answer)
    for seed in range(3):
        tokens, has_ended = thinking(grammar, limit, seed, channel)
        assert has_ended, tokens
        known = TOOL_CALL_FORMATS["harmony"]
        parser = MessageParser(message_grammar(known, None, False), lambda: "call-0")
        text = b"".join(map(TOKENIZER.token_bytes, tokens)).decode(errors="replace")
        content = parser.feed(text).followed_by(parser.finish()).content
        if channel == "analysis":
            assert content in ("yes", "no") or isinstance(json.loads(content), dict)
        else:  # the commentary is content, too
            assert content.endswith(("yes", "no", "}"))


def test_the_shortest_end_of_free_text_is_its_marker():
    compiled = COMPILER.compile(grammar_of(ANSWERS["schema"]))
    closing = compiled.closing
    matcher = closing.matcher.deep_copy()
    vocabulary = closing.vocabulary
    for token_id in TOKENIZER.encode("<|channel|>analysis<|message|>Hm", add_special_tokens=False):
        assert matcher.consume_tokens(vocabulary.byte_ids(vocabulary.path_of(token_id)))
    ending = ClosingSearch(matcher, vocabulary, 48, [closing.ending]).ending()
    assert ending is not None
    text = b"".join(map(TOKENIZER.token_bytes, ending.tokens())).decode()
    opening = "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert text.startswith(opening)
    assert set(json.loads(text.removeprefix(opening))) == {"a", "b"}
