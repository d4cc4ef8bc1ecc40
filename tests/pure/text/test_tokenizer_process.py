"""Long texts are tokenised in a process of their own, to the same tokens."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers.tokenizers import Tokenizer as Library

import quickstep
from quickstep.errors import EngineError, RequestError
from quickstep.text.tokenizer import LONG_CHARS, Tokenizer
from quickstep.text.tokenizer_process import TokenizerProcess

DEMO = Path(quickstep.__file__).parent / "bundled" / "demo"
LONG = "def f(x):\n    return 'ä' + x\n" * (LONG_CHARS // 25)


@pytest.fixture(scope="module")
def process() -> Iterator[TokenizerProcess]:
    yield TokenizerProcess(DEMO)


@pytest.fixture(scope="module")
def tokenizer(process: TokenizerProcess) -> Tokenizer:
    return Tokenizer.open(DEMO, process)


def test_only_long_texts_start_the_process() -> None:
    process = TokenizerProcess(DEMO)
    assert Tokenizer.open(DEMO, process).encode("x" * LONG_CHARS)
    assert process.process_id is None


@pytest.mark.parametrize("add_special_tokens", [False, True])
@pytest.mark.parametrize("texts", [[LONG], [" " * 2000] * 64, ["", LONG, "a"]])
def test_the_tokens_are_those_of_this_process(
    tokenizer: Tokenizer, process: TokenizerProcess, texts: list[str], add_special_tokens: bool
) -> None:
    expected = Tokenizer.open(DEMO).encode_all(texts, add_special_tokens)
    assert sum(map(len, texts)) > LONG_CHARS
    assert tokenizer.encode_all(texts, add_special_tokens) == expected
    assert process.process_id is not None


def test_steps_of_the_engine_come_first(tokenizer: Tokenizer, process: TokenizerProcess) -> None:
    tokenizer.encode(LONG)
    assert process.process_id is not None
    assert os.getpriority(os.PRIO_PROCESS, process.process_id) > os.getpriority(os.PRIO_PROCESS, 0)


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="half a surrogate pair"):
        tokenizer.encode(LONG + "\ud800")


def test_a_process_that_died_in_a_call_fails_it_and_is_replaced(
    tokenizer: Tokenizer, process: TokenizerProcess
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
    tokenizer: Tokenizer, process: TokenizerProcess
) -> None:
    expected = tokenizer.encode(LONG)
    assert process.process_id is not None
    os.kill(process.process_id, signal.SIGKILL)
    os.waitid(os.P_PID, process.process_id, os.WEXITED | os.WNOWAIT)
    assert tokenizer.encode(LONG) == expected


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
