"""Slots in files: what a client saves is a cached prefix again after a restart."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from late_copies import use_late_copies

from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.engine import Engine
from quickstep.errors import ConfigError, EngineError, QuickstepError, RequestError
from quickstep.types import Delta, Request, SamplingParams, SequenceTimings

PROMPT = tuple(range(20, 450))
NUM_TOKENS = len(PROMPT) // 16 * 16
SALT = "3:ann"


@pytest.fixture(autouse=True, params=["host", "device"])
def where_blocks_are(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host, or moved as those of a device."""
    if request.param == "device":
        use_late_copies(monkeypatch)


def engine_for(directory: Path | None, **cache: Any) -> Engine:
    cache.setdefault("num_blocks", 64)
    return open_engine(
        EngineConfig(
            load=LoadConfig("demo", num_threads=1),
            cache=CacheConfig(
                slot_save_path=None if directory is None else str(directory), **cache
            ),
            scheduler=SchedulerConfig(),
            max_model_len=512,
            seed=0,
        )
    )


def run(test: Callable[[Engine], Coroutine[Any, Any, None]], engine: Engine) -> None:
    async def started() -> None:
        await engine.start()
        try:
            await test(engine)
        finally:
            await engine.stop()

    asyncio.run(started())


async def all_of(engine: Engine, prompt: tuple[int, ...] = PROMPT) -> list[Delta]:
    sampling = SamplingParams(max_tokens=12, temperature=0.9, seed=4, logprobs=2)
    request = Request("", prompt, sampling, cache_salt=SALT)
    return [delta async for delta in engine.stream(request)]


def content(deltas: list[Delta]) -> tuple[object, ...]:
    return tuple((delta.token_ids, delta.logprobs) for delta in deltas)


def num_cached(deltas: list[Delta]) -> int:
    (timings,) = [delta.timings for delta in deltas if delta.timings is not None]
    assert isinstance(timings, SequenceTimings)
    assert timings.num_cached_tokens is not None
    return timings.num_cached_tokens


def saved(directory: Path, name: str = "talk.bin") -> list[Delta]:
    """Save the slot of `PROMPT`; what the prompt gave."""
    found: list[Delta] = []

    async def test(engine: Engine) -> None:
        found.extend(await all_of(engine))
        prefix = await engine.save_slot(name, "", SALT, PROMPT)
        assert prefix.token_ids == PROMPT[:NUM_TOKENS]
        assert prefix.num_bytes == (directory / name).stat().st_size

    run(test, engine_for(directory))
    return found


def refused(directory: Path, kind: type[QuickstepError], match: str, salt: str = SALT) -> None:
    async def test(engine: Engine) -> None:
        with pytest.raises(kind, match=match):
            await engine.restore_slot("talk.bin", salt)
        await all_of(engine)

    run(test, engine_for(directory))


@pytest.mark.parametrize("num_blocks", [32, 64])  # 32 is room for one sequence of the longest
def test_a_restored_slot_gives_the_same_bits(tmp_path: Path, num_blocks: int) -> None:
    expected = saved(tmp_path)

    async def test(engine: Engine) -> None:
        prefix = await engine.restore_slot("talk.bin", SALT)
        assert (prefix.adapter, prefix.token_ids) == ("", PROMPT[:NUM_TOKENS])
        restored = await all_of(engine)
        assert content(restored) == content(expected)
        assert num_cached(restored) == NUM_TOKENS

    run(test, engine_for(tmp_path, num_blocks=num_blocks))
    assert num_cached(expected) == 0


def test_a_slot_is_restored_while_other_requests_run(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    other = tuple(range(600, 700))

    async def test(engine: Engine) -> None:
        running = asyncio.create_task(all_of(engine, other))
        await asyncio.sleep(0)
        await engine.restore_slot("talk.bin", SALT)
        assert content(await all_of(engine)) == content(expected)
        await running
        before = await engine.reset_prefix_cache()
        assert before > NUM_TOKENS // 16

    run(test, engine_for(tmp_path))


def test_a_slot_is_restored_twice_and_saved_again(tmp_path: Path) -> None:
    saved(tmp_path)

    async def test(engine: Engine) -> None:
        first = await engine.restore_slot("talk.bin", SALT)
        assert await engine.restore_slot("talk.bin", SALT) == first
        await engine.save_slot("copy.bin", "", SALT, first.token_ids)

    run(test, engine_for(tmp_path))
    assert (tmp_path / "copy.bin").read_bytes() == (tmp_path / "talk.bin").read_bytes()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["copy.bin", "talk.bin"]
    assert (tmp_path / "copy.bin").stat().st_mode & 0o077 == 0


def test_a_slot_of_another_key_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    refused(tmp_path, RequestError, "another API key", salt="3:bob")


def test_a_slot_of_another_kv_dtype_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)

    async def test(engine: Engine) -> None:
        with pytest.raises(RequestError, match="another model, KV dtype"):
            await engine.restore_slot("talk.bin", SALT)

    run(test, engine_for(tmp_path, kv_dtype="int8"))


def test_changed_blocks_are_computed_again(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    path = tmp_path / "talk.bin"
    content_of = bytearray(path.read_bytes())
    content_of[len(content_of) // 2] ^= 1
    path.write_bytes(content_of)

    async def test(engine: Engine) -> None:
        with pytest.raises(EngineError, match="has changed; a part of it is restored"):
            await engine.restore_slot("talk.bin", SALT)
        found = await all_of(engine)
        assert content(found) == content(expected)
        assert 0 < num_cached(found) < NUM_TOKENS

    run(test, engine_for(tmp_path))


@pytest.mark.parametrize("size", [0, 10, 100, 5000])
def test_a_torn_file_is_refused(tmp_path: Path, size: int) -> None:
    saved(tmp_path)
    os.truncate(tmp_path / "talk.bin", size)
    refused(tmp_path, QuickstepError, "is not used|has changed")


def test_a_file_that_is_not_there_is_404(tmp_path: Path) -> None:
    async def test(engine: Engine) -> None:
        with pytest.raises(RequestError, match="there is no slot 'x'") as error:
            await engine.restore_slot("x", SALT)
        assert error.value.status == 404

    run(test, engine_for(tmp_path))


def test_names_cannot_leave_the_directory(tmp_path: Path) -> None:
    directory = tmp_path / "slots"

    async def test(engine: Engine) -> None:
        await all_of(engine)
        for name in ("", ".", "..", "../x", "a/b", "/etc/x", ".x", "a\\b", "a\nb", "é" * 101):
            with pytest.raises(RequestError, match="filename is"):
                await engine.save_slot(name, "", SALT, PROMPT)
            with pytest.raises(RequestError, match="filename is"):
                await engine.restore_slot(name, SALT)
            assert not list(directory.iterdir()), name
            assert list(tmp_path.iterdir()) == [directory], name

    run(test, engine_for(directory))


def test_blocks_are_saved_when_they_are_computed(tmp_path: Path) -> None:
    """They are found from the plan of their step on, which is before their content is there."""
    expected: list[Delta] = []

    async def save(engine: Engine) -> None:
        computing = asyncio.create_task(all_of(engine))
        while True:
            try:
                await engine.save_slot("talk.bin", "", SALT, PROMPT)
                break
            except EngineError as error:
                assert "is cached" in str(error)
            await asyncio.sleep(0)
        expected.extend(await computing)

    async def restore(engine: Engine) -> None:
        restored = await engine.restore_slot("talk.bin", SALT)
        answer = await all_of(engine)
        assert num_cached(answer) == len(restored.token_ids) > 0
        assert content(answer) == content(expected)

    run(save, engine_for(tmp_path))
    run(restore, engine_for(tmp_path))


def test_a_prefix_that_was_evicted_is_not_saved(tmp_path: Path) -> None:
    async def test(engine: Engine) -> None:
        await all_of(engine)
        await engine.reset_prefix_cache()
        with pytest.raises(EngineError, match="nothing of the slot's 430 tokens is cached"):
            await engine.save_slot("talk.bin", "", SALT, PROMPT)

    run(test, engine_for(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: Engine) -> None:
        await all_of(engine)
        tmp_path.chmod(0o500)
        with pytest.raises(EngineError, match="the slot is not saved"):
            await engine.save_slot("sub", "", SALT, PROMPT)

    (tmp_path / "sub").mkdir(mode=0o700)  # a name that cannot be replaced, for root too
    (tmp_path / "sub" / "x").touch()
    try:
        run(test, engine_for(tmp_path))
    finally:
        tmp_path.chmod(0o700)
    assert [path.name for path in tmp_path.iterdir()] == ["sub"]


def test_without_the_option_slots_are_refused() -> None:
    async def test(engine: Engine) -> None:
        with pytest.raises(RequestError, match="start it with --slot-save-path DIR") as error:
            await engine.save_slot("x", "", SALT, PROMPT)
        assert error.value.status == 501

    run(test, engine_for(None))


def test_options_that_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave --no-enable-prefix-caching out"):
        CacheConfig(slot_save_path=str(tmp_path), prefix_caching=False)
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"--slot-save-path is .* others may read"):
        engine_for(tmp_path)
