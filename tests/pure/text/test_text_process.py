"""Long texts and conversations go to a process of their own, and the results are the same."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers.tokenizers import Tokenizer as Library

import quickstep
from quickstep.config import InputConfig
from quickstep.errors import EngineError, RequestError
from quickstep.text.chat_template import LONG_CHAT, ChatTemplate
from quickstep.text.text_process import ChatToRender, TextProcess
from quickstep.text.tokenizer import LONG_CHARS, Tokenizer

DEMO = Path(quickstep.__file__).parent / "bundled" / "demo"
DEADLINE_S = 60
TURNS = [
    {"role": "user", "content": "ä?"},
    {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
] * LONG_CHAT
CALL = {"name": "add", "arguments": '{"a": 1.0, "b": [true, null], "n": 12345678901234567890}'}
LONG = "def f(x):\n    return 'ä' + x\n" * (LONG_CHARS // 25)


@pytest.fixture(scope="module")
def process() -> Iterator[TextProcess]:
    yield TextProcess(DEMO)


@pytest.fixture(scope="module")
def template(process: TextProcess) -> ChatTemplate:
    return opened(process)


def opened(process: TextProcess | None = None, inputs: InputConfig | None = None) -> ChatTemplate:
    template = ChatTemplate.open(DEMO, {}, datetime.now, inputs, process)
    assert template is not None
    return template


def started(process: TextProcess) -> None:
    """Wait until the process is there and idle."""
    until_s = time.monotonic() + DEADLINE_S
    while process.render(ChatToRender(TURNS, None, True, None, False)) is None:
        assert time.monotonic() < until_s
        time.sleep(0.01)


@pytest.fixture(scope="module")
def tokenizer(process: TextProcess) -> Tokenizer:
    return Tokenizer.open(DEMO, process)


def test_only_long_texts_start_the_process() -> None:
    process = TextProcess(DEMO)
    assert Tokenizer.open(DEMO, process).encode("x" * LONG_CHARS)
    assert process.process_id is None


@pytest.mark.parametrize("add_special_tokens", [False, True])
@pytest.mark.parametrize("texts", [[LONG], [" " * 2000] * 64, ["", LONG, "a"]])
def test_the_tokens_are_those_of_this_process(
    tokenizer: Tokenizer, process: TextProcess, texts: list[str], add_special_tokens: bool
) -> None:
    expected = Tokenizer.open(DEMO).encode_all(texts, add_special_tokens)
    assert sum(map(len, texts)) > LONG_CHARS
    assert tokenizer.encode_all(texts, add_special_tokens) == expected
    assert process.process_id is not None


def test_steps_of_the_engine_come_first(tokenizer: Tokenizer, process: TextProcess) -> None:
    tokenizer.encode(LONG)
    assert process.process_id is not None
    assert os.getpriority(os.PRIO_PROCESS, process.process_id) > os.getpriority(os.PRIO_PROCESS, 0)


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="half a surrogate pair"):
        tokenizer.encode(LONG + "\ud800")


def test_a_process_that_died_in_a_call_fails_it_and_is_replaced(
    tokenizer: Tokenizer, process: TextProcess
) -> None:
    expected = tokenizer.encode(LONG)
    assert process.process_id is not None
    os.kill(process.process_id, signal.SIGSTOP)
    os.waitid(os.P_PID, process.process_id, os.WSTOPPED | os.WNOWAIT)
    with ThreadPoolExecutor() as pool:
        call = pool.submit(tokenizer.encode, LONG)
        with Path(f"/proc/{process.process_id}/fd/0").open("rb", buffering=0) as its_input:
            assert select.select([its_input], [], [], 60)[0]  # the text is being written
        os.kill(process.process_id, signal.SIGKILL)
        with pytest.raises(EngineError, match="ended with code -9"):
            call.result()
    assert tokenizer.encode(LONG) == expected


def test_a_process_that_died_between_two_calls_fails_none(
    tokenizer: Tokenizer, process: TextProcess
) -> None:
    expected = tokenizer.encode(LONG)
    assert process.process_id is not None
    os.kill(process.process_id, signal.SIGKILL)
    os.waitid(os.P_PID, process.process_id, os.WEXITED | os.WNOWAIT)
    assert tokenizer.encode(LONG) == expected


@pytest.mark.parametrize(
    "messages",
    [
        TURNS,
        [{"role": "system", "content": "a"}, *TURNS, {"role": "system", "content": "b"}],
        [*TURNS, {"role": "assistant", "tool_calls": [{"id": "1", "function": CALL}]}],
        [*TURNS, {"role": "assistant", "tool_calls": [{"function": {**CALL, "arguments": "{"}}]}],
    ],
)
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "add"}}] * 40])
@pytest.mark.parametrize("is_continued", [False, True])
def test_the_text_of_a_conversation_is_that_of_this_process(
    template: ChatTemplate,
    process: TextProcess,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    is_continued: bool,
) -> None:
    if is_continued:
        messages = [*messages, {"role": "assistant", "content": "and"}]
    started(process)
    arguments = (messages, tools, not is_continued, {"enable_thinking": False}, is_continued)
    expected = opened().render(*arguments)
    assert process.render(ChatToRender(*arguments)) == expected
    assert template.render(*arguments) == expected


def test_a_conversation_is_refused_as_by_this_process(
    template: ChatTemplate, process: TextProcess
) -> None:
    started(process)
    with pytest.raises(RequestError, match="needs a role") as here:
        opened().render([*TURNS, {"content": "a"}])
    with pytest.raises(RequestError, match="needs a role") as there:
        template.render([*TURNS, {"content": "a"}])
    assert (str(here.value), here.value.param) == (str(there.value), there.value.param)


def test_the_process_has_the_template_of_the_command_line() -> None:
    inputs = InputConfig(chat_template="{{ messages | length }} {{ documents }}")
    process = TextProcess(DEMO, inputs)
    started(process)
    expected = f"{len(TURNS)} None"
    assert process.render(ChatToRender(TURNS, None, True, None, False)) == expected
    assert opened(process, inputs).render(TURNS) == expected


@pytest.mark.parametrize("value", [2**70, "\ud800"])
def test_values_that_no_frame_has_are_rendered_here(
    template: ChatTemplate, process: TextProcess, value: int | str
) -> None:
    started(process)
    extra = {"documents": value}
    assert process.render(ChatToRender(TURNS, None, True, extra, False)) is None
    assert template.render(TURNS, extra=extra) == opened().render(TURNS, extra=extra)


def test_a_conversation_does_not_wait_for_the_process() -> None:
    process = TextProcess(DEMO)
    template = opened(process)
    expected = opened().render(TURNS)
    assert template.render(TURNS[:LONG_CHAT]) == opened().render(TURNS[:LONG_CHAT])
    assert process.process_id is None
    assert template.render(TURNS) == expected  # while it starts
    started(process)
    assert process.process_id is not None
    os.kill(process.process_id, signal.SIGSTOP)
    os.waitid(os.P_PID, process.process_id, os.WSTOPPED | os.WNOWAIT)
    with ThreadPoolExecutor() as pool:
        call = pool.submit(Tokenizer.open(DEMO, process).encode, LONG)
        with Path(f"/proc/{process.process_id}/fd/0").open("rb", buffering=0) as its_input:
            assert select.select([its_input], [], [], DEADLINE_S)[0]
        assert template.render(TURNS) == expected  # while it works on a text
        os.kill(process.process_id, signal.SIGCONT)
        assert call.result()


def test_short_calls_keep_the_lock_of_the_interpreter() -> None:
    """Those of the library for one text do, and give the same as those for several."""
    library = Library.from_file(str(DEMO / "tokenizer.json"))
    names: list[str] = []

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            names.append(name)
            return getattr(library, name)

    tokenizer = Tokenizer(Recorded())
    names.clear()
    for num_chars in (0, 1, 1000, 1024, 1025, 3000):
        text = ("ä = f(x)\n" * num_chars)[:num_chars]
        [expected] = library.encode_batch_fast([text])
        assert tokenizer.encode(text) == expected.ids
        [pair] = library.encode_batch_fast([(text, text)])
        assert tokenizer.encode_pair(text, text) == pair.ids
        for is_skipped in (False, True):
            [decoded] = library.decode_batch([expected.ids], skip_special_tokens=is_skipped)
            assert tokenizer.decode(expected.ids, is_skipped) == decoded
    assert names.count("encode") == 4 + 2  # pairs of 0, 1 and more than 1024 characters
    assert names.count("encode_batch_fast") == 2 + 4
    assert "decode" in names
