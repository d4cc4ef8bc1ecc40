"""The demo model: its training data are deterministic and clean, its files belong together."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from tools.demo_model.chat import Conversation, ask, chat_renderer, tool_call, user
from tools.demo_model.corpus import (
    HELD_OUT_MODULES,
    Corpus,
    is_held_out,
    load_corpus,
    top_module,
)
from tools.demo_model.dataset import RowSampler, TokenArrays, chat_texts
from tools.demo_model.facts import Fact, load_facts, summary_line
from tools.demo_model.ngram import NgramModel
from tools.demo_model.schedule import DECAY_START, learning_rate_scale
from tools.demo_model.tool_dialogues import TOOLS, tool_conversations

REPOSITORY = Path(__file__).parents[3]

DEMO = REPOSITORY / "src" / "quickstep" / "bundled" / "demo"
MAX_BUNDLED_BYTES = 40 * 2**20


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture(scope="module")
def facts() -> tuple[Fact, ...]:
    return load_facts()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def _json(name: str) -> dict[str, object]:
    return json.loads((DEMO / name).read_text(encoding="utf-8"))


def test_corpus_is_the_same_every_time(corpus: Corpus) -> None:
    assert load_corpus() == corpus


def test_every_held_out_module_is_held_out_and_none_is_trained_on(corpus: Corpus) -> None:
    assert {top_module(one.name) for one in corpus.held_out} == set(HELD_OUT_MODULES)
    for document in (*corpus.library, *corpus.tests):
        assert not is_held_out(document.name)
    trained_on = {document.text for document in (*corpus.library, *corpus.tests)}
    copies = [one.name for one in corpus.held_out if one.text in trained_on]
    assert copies in ([], ["xmlrpc/__init__.py"])  # one comment line, as in other packages


@pytest.mark.parametrize(
    ("name", "held_out"),
    [
        ("statistics.py", True),
        ("xmlrpc/client.py", True),
        ("xmlrpc.client.ServerProxy", True),
        ("test/test_statistics.py", True),
        ("test/test_tomllib/test_data.py", True),
        ("stat.py", False),
        ("cmath", False),
        ("test/test_cmd_line.py", True),
        ("test/test_cmath.py", False),
        ("json/decoder.py", False),
    ],
)
def test_held_out_names(name: str, held_out: bool) -> None:
    assert is_held_out(name) is held_out


def test_facts_are_deterministic_and_never_about_held_out_modules(facts: tuple[Fact, ...]) -> None:
    assert load_facts() == facts
    assert not [fact.name for fact in facts if is_held_out(fact.name)]
    known = {fact.name: fact for fact in facts}
    assert known["json.dumps"].summary == "Serialize ``obj`` to a JSON formatted ``str``."
    assert known["os.getpid"].signature == "os.getpid()"


def test_summary_skips_the_call_forms_of_builtins() -> None:
    def call_form_first() -> None:
        """call_form_first(x) -> None

        Do one
        thing. Then another.
        """

    assert summary_line(call_form_first) == "Do one thing."


def test_conversations_depend_on_the_seed_alone(facts: tuple[Fact, ...]) -> None:
    few = facts[:40]
    assert chat_texts(few, seed=1) == chat_texts(few, seed=1)
    assert chat_texts(few, seed=1) != chat_texts(few, seed=2)


def test_every_tool_call_names_an_offered_tool(facts: tuple[Fact, ...]) -> None:
    for conversation in tool_conversations(facts, 200, random.Random(0)):
        offered = {tool["function"]["name"] for tool in conversation.tools}
        for message in conversation.messages:
            for call in message.get("tool_calls", ()):
                assert call["function"]["name"] in offered


def test_rows_of_a_step_do_not_depend_on_the_steps_before() -> None:
    generator = np.random.default_rng(0)
    text = generator.integers(0, 9, 500, dtype=np.uint16)
    starts = np.array([0, 7, 30, 31, 90], np.int64)
    arrays = TokenArrays(text, text, text[:90], np.ones(90, np.float32), starts)
    fresh, used = RowSampler(arrays), RowSampler(arrays)
    for step in range(3):
        used.rows(step, 4, 16, 0.5)
    assert all(map(np.array_equal, fresh.rows(3, 4, 16, 0.5), used.rows(3, 4, 16, 0.5)))


def test_learning_rate_warms_up_stays_and_ends_at_zero() -> None:
    assert 0.0 < learning_rate_scale(0.0) < learning_rate_scale(0.005) < 1.0
    assert learning_rate_scale(0.3) == learning_rate_scale(DECAY_START) == 1.0
    assert learning_rate_scale(1.0) == 0.0


def test_ngram_probabilities_sum_to_one() -> None:
    vocab_size = 5
    tokens = np.random.default_rng(0).integers(0, vocab_size, 300).astype(np.uint16)
    model = NgramModel(tokens, vocab_size)
    for context in ([0, 1, 2, 3], list(tokens[-4:]), [4, 4, 4, 4]):
        probabilities = [
            2 ** model.log2_probabilities(np.array([*context, token], np.uint16))[-1]
            for token in range(vocab_size)
        ]
        assert sum(probabilities) == pytest.approx(1.0)


def test_tokenizer_and_config_agree(tokenizer: Tokenizer) -> None:
    config, generation = _json("config.json"), _json("generation_config.json")
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 4096
    assert config["eos_token_id"] == tokenizer.token_to_id("<|im_end|>")
    assert generation["eos_token_id"] == [
        tokenizer.token_to_id("<|im_end|>"),
        tokenizer.token_to_id("<|endoftext|>"),
    ]


def test_tokenizer_keeps_every_byte_and_splits_digits(tokenizer: Tokenizer) -> None:
    text = 'def f(x):\n    """hé ✓ 😀"""\n\n\tif x:\r\n        return 1234.5 \n\n'
    encoding = tokenizer.encode(text)
    assert tokenizer.decode(encoding.ids) == text
    assert {"1", "2", "3", "4"} <= set(encoding.tokens)


def test_chat_template_renders_turns_and_tools(tokenizer: Tokenizer) -> None:
    render = chat_renderer(str(_json("tokenizer_config.json")["chat_template"]))
    assert render(ask("Hi", "Be concise.")) == (
        "<|im_start|>system\nBe concise.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    assert render(Conversation((parts,))) == "<|im_start|>user\nHi<|im_end|>\n"
    call = tool_call("get_weather", {"city": "Köln"})
    text = render(Conversation((user("Weather in Köln?"), call), TOOLS[:1]))
    called = '{"name": "get_weather", "arguments": {"city": "Köln"}}'
    assert text.endswith(f"<tool_call>\n{called}\n</tool_call><|im_end|>\n")
    assert json.dumps(TOOLS[0]) in text
    call["tool_calls"][0]["function"]["arguments"] = '{"city": "Köln"}'  # as the OpenAI API has it
    assert render(Conversation((user("Weather in Köln?"), call), TOOLS[:1])) == text
    assert "<tool_call>" in tokenizer.decode(tokenizer.encode(text).ids)


def test_weights_match_the_config_and_stay_small() -> None:
    config = _json("config.json")
    with safe_open(DEMO / "model.safetensors", framework="np") as weights:
        names = set(weights.keys())
        embedding = weights.get_slice("model.embed_tokens.weight")
        assert embedding.get_shape() == [config["vocab_size"], config["hidden_size"]]
        assert embedding.get_dtype() == "BF16"
    assert f"model.layers.{config['num_hidden_layers'] - 1}.mlp.down_proj.weight" in names
    assert "lm_head.weight" not in names
    bundled = DEMO.parent
    assert sum(p.stat().st_size for p in bundled.rglob("*") if p.is_file()) <= MAX_BUNDLED_BYTES
