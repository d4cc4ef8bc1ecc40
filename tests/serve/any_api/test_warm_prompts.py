"""`--warm-prompts`: what is computed for whom, and errors that name the line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_engine import FakeEngine, Submitted

from quickstep.errors import ConfigError
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.operate.warm_prompts import read_warm_prompts, warm_prefix_cache
from quickstep.server.options import ServerOptions
from quickstep.server.usage.api_keys import ApiKeys

KEYS = ApiKeys(["ann=AAAA", "bob=BBBB"])


def warmed(
    tmp_path: Path, text: str, name: str = "p.jsonl", keys: ApiKeys = KEYS, shared: bool = False
) -> list[Submitted]:
    """What the engine got for a file."""
    path = tmp_path / name
    path.write_text(text)
    prompts = read_warm_prompts(path, keys)
    engine = FakeEngine()
    options = ServerOptions(api_keys=keys, share_prefix_cache=shared, warm_prompts=prompts)
    asyncio.run(warm_prefix_cache(ModelRegistry.of_one(engine, options).default, prompts))
    assert not engine.open_streams
    return engine.submitted


def test_each_line_of_a_text_file_is_a_prompt(tmp_path: Path) -> None:
    first, second = warmed(tmp_path, "abc\n\n de\n", "p.txt", ApiKeys())
    assert (first.prompt, second.prompt) == ((1, *b"abc"), (1, *b" de"))
    assert (first.cache_salt, first.tenant, first.sampling.max_tokens) == ("", "", 1)


def test_a_prompt_is_computed_for_every_key_or_for_those_that_are_named(tmp_path: Path) -> None:
    lines = '{"prompt": "ab"}\n{"prompt": "ab", "api_keys": ["bob"], "cache_salt": "x"}\n'
    assert [one.cache_salt for one in warmed(tmp_path, lines)] == ["3:ann", "3:bob", "3:bobx"]
    assert [one.cache_salt for one in warmed(tmp_path, lines, shared=True)] == ["", "x"]


def test_a_system_prompt_is_computed_up_to_the_users_message(tmp_path: Path) -> None:
    system = '{"role": "system", "content": "be brief"}'
    user = '{"role": "user", "content": "hi"}'
    lines = f'{{"messages": [{system}]}}\n{{"messages": [{system}, {user}]}}\n'
    first, second = warmed(tmp_path, lines, keys=ApiKeys())
    assert bytes(first.prompt) == b"system: be brief\nuser: "
    assert bytes(second.prompt) == b"system: be brief\nuser: hi\nassistant:"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: Input data was truncated"),
        ("[]", "line 2: it must be an object with either messages or prompt"),
        ('{"prompt": "a", "messages": []}', "line 2: it must be an object with either"),
        ('{"prompt": "a", "api_keys": ["eve"]}', "line 2: there is no API key with the name 'eve'"),
        ('{"prompt": "a", "api_keys": []}', "line 2: api_keys must be a list"),
        ('{"messages": []}', "line 2: messages is an empty list"),
        ('{"messages": [{"role": "system"}]}', "line 2: .*content"),
        ('{"prompt": [7, 999]}', "line 2: .*999"),
    ],
)
def test_an_error_names_the_line(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        warmed(tmp_path, f'{{"prompt": [1, 2]}}\n{line}\n')


def test_a_file_without_prompts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no prompt"):
        warmed(tmp_path, "\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_warm_prompts(tmp_path / "missing.txt", KEYS)


def test_a_prompt_below_a_block_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warmed(tmp_path, "ab\nabcd\n", "p.txt", ApiKeys())  # the first token is the tokenizer's own
    (warning,) = [record.getMessage() for record in caplog.records if "block" in record.msg]
    assert warning == (
        "--warm-prompts line 1 has 3 tokens, less than a block of 4: none of it is cached"
    )
