"""KV blocks that survive their engine, in files."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import pytest
from late_copies import use_late_copies

from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig
from quickstep.core.resources.kv_tiers import KVTiers, RestorePiece, SaveOrder, Span, TierBlock
from quickstep.engine.assembly import open_engine
from quickstep.engine.engine import Engine
from quickstep.engine.kv_files import directory as directory_module
from quickstep.engine.kv_files.directory import KVDirectory
from quickstep.errors import ConfigError, EngineError
from quickstep.types import Delta, Request, SamplingParams, SequenceTimings

PROMPT = tuple(range(20, 450))
NUM_BLOCKS = len(PROMPT) // 16


@pytest.fixture(autouse=True, params=["host", "device"])
def where_blocks_are(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host, or moved as those of a device."""
    if request.param == "device":
        use_late_copies(monkeypatch)


@pytest.fixture(autouse=True)
def every_restore_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast this machine computes; `tests/pure/core/test_kv_tiers.py` has the decision."""
    monkeypatch.setattr(KVTiers, "_pays", lambda *_: True)


def engine_for(directory: Path | None, num_blocks: int = 64, **options: Any) -> Engine:
    return open_engine(
        EngineConfig(
            load=LoadConfig("demo", num_threads=1),
            cache=CacheConfig(
                num_blocks=num_blocks,
                kv_cache_dir=None if directory is None else str(directory),
                **options,
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


async def all_of(engine: Engine, prompt: tuple[int, ...], **fields: Any) -> list[Delta]:
    sampling = SamplingParams(max_tokens=12, temperature=0.9, seed=4, logprobs=2)
    return [delta async for delta in engine.stream(Request("", prompt, sampling, **fields))]


def content(deltas: list[Delta]) -> tuple[object, ...]:
    return tuple((delta.token_ids, delta.logprobs) for delta in deltas)


def timings_of(deltas: list[Delta]) -> SequenceTimings:
    (timings,) = [delta.timings for delta in deltas if delta.timings is not None]
    return timings


def test_a_prefix_survives_a_restart_with_the_same_bits(tmp_path: Path) -> None:
    found: list[list[Delta]] = []

    async def test(engine: Engine) -> None:
        found.append(await all_of(engine, PROMPT))

    for directory in (None, tmp_path, tmp_path):
        run(test, engine_for(directory))
    expected, cold, restored = found
    assert content(cold) == content(restored) == content(expected)
    assert timings_of(cold).num_cached_tokens == 0
    times = timings_of(restored)
    assert times.num_cached_tokens == times.num_restored_tokens == NUM_BLOCKS * 16
    assert times.restore_s > 0.0


def span_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*.kv"))


def stored(directory: Path, prompt: tuple[int, ...] = PROMPT) -> list[Delta]:
    """Run a prompt in an engine that stores its blocks; what it gave."""
    found: list[Delta] = []

    async def test(engine: Engine) -> None:
        found.extend(await all_of(engine, prompt))

    run(test, engine_for(directory))
    return found


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kv_cache_disk_bytes": 1}, "needs --kv-cache-dir"),
        ({"kv_cache_dir": "kv", "prefix_caching": False}, "leave --no-enable-prefix-caching out"),
        ({"kv_cache_dir": "kv", "kv_cache_disk_bytes": 0}, "at least 1"),
    ],
)
def test_options_that_have_no_effect_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        CacheConfig(**options)


def test_what_cannot_store_its_blocks_is_refused(tmp_path: Path) -> None:
    config = EngineConfig(
        load=LoadConfig("demo", num_threads=1),
        cache=CacheConfig(num_blocks=64, kv_cache_dir=str(tmp_path)),
        scheduler=SchedulerConfig(use_kv_cache=False),
    )
    with pytest.raises(ConfigError, match="--no-kv-cache out"):
        open_engine(config)
    file = tmp_path / "file"
    file.write_text("no directory")
    with pytest.raises(ConfigError, match="cannot be used"):
        engine_for(file)


def test_only_the_owner_reads_the_files(tmp_path: Path) -> None:
    stored(tmp_path / "new" / "cache")
    (directory,) = (tmp_path / "new" / "cache").iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    directory.chmod(0o750)
    with pytest.raises(ConfigError, match="chmod 700"):
        engine_for(tmp_path / "new" / "cache")


def test_a_changed_file_is_a_miss_with_the_same_bits(tmp_path: Path) -> None:
    """One byte anywhere: in the header, in a block; or the file ends early."""
    expected = content(stored(tmp_path))
    (path,) = span_files(tmp_path)
    sound, random = path.read_bytes(), Random(7)
    places = [0, 9, 14, 30, len(sound) - 1, *(random.randrange(len(sound)) for _ in range(6))]
    for place in places:
        changed = bytearray(sound)
        changed[place] ^= 1 << random.randrange(8)
        path.write_bytes(changed)
        again = stored(tmp_path)
        assert content(again) == expected, f"bit of byte {place}"
        is_in_prompt = place < len(sound) * NUM_BLOCKS // (NUM_BLOCKS + 1)
        is_restored = timings_of(again).num_restored_tokens == NUM_BLOCKS * 16
        assert is_restored != is_in_prompt, f"bit of byte {place}"
    path.write_bytes(sound[:-1])
    assert timings_of(stored(tmp_path)).num_restored_tokens == 0
    again = stored(tmp_path)
    assert timings_of(again).num_restored_tokens == NUM_BLOCKS * 16, "it was written again"


@pytest.mark.parametrize("other", [("model", 8), ("other", 8), ("other", 4), ("model", 4)])
def test_a_file_of_another_model_or_form_is_not_read(
    tmp_path: Path, other: tuple[str, int]
) -> None:
    """Wherever it was copied to, before the start or while the engine runs."""
    own = ("model", 8)
    writer, reader = (
        KVDirectory.open(tmp_path / "a", *own),
        KVDirectory.open(tmp_path / "b", *other),
    )
    block = TierBlock(b"digest", b"identity")
    order = SaveOrder(Span("span", 0, (block.digest,)), (block,), (3,), ())
    writer.write(order, [[b"12345678"]])
    place = bytearray(other[1])
    piece = RestorePiece("span", 0, (block,), (5,))
    (path,) = writer.path.glob("*.kv")
    copied = reader.path / path.name
    copied.write_bytes(path.read_bytes())
    if other == own:
        reader.read(piece, [[memoryview(place)]])
        assert bytes(place) == b"12345678"
        assert [span.name for span in reader.spans()] == ["span"]
    else:
        with pytest.raises(EngineError):
            reader.read(piece, [[memoryview(place)]])
        assert not any(place)
        assert reader.spans() == [] and not copied.exists()
    writer.close()
    reader.close()


def test_a_block_that_changes_while_the_engine_runs_is_forgotten(tmp_path: Path) -> None:
    async def test(engine: Engine) -> None:
        expected = content(await all_of(engine, PROMPT))
        async with asyncio.timeout(10):  # a file is there before the scheduler knows its blocks
            while (tier := engine.stats().scheduler.kv_tier) is None or tier.num_saved < NUM_BLOCKS:
                await asyncio.sleep(0.005)
        (path,) = span_files(tmp_path)
        changed = bytearray(path.read_bytes())
        changed[len(changed) // 2] ^= 1
        path.write_bytes(changed)
        await engine.reset_prefix_cache()
        again = await all_of(engine, PROMPT)
        assert content(again) == expected
        assert timings_of(again).num_restored_tokens == 0
        tier = engine.stats().scheduler.kv_tier
        assert tier is not None and tier.num_lost > NUM_BLOCKS, "with the one of the outputs"

    run(test, engine_for(tmp_path))


def test_the_second_process_reads_only(tmp_path: Path) -> None:
    stored(tmp_path)
    first = engine_for(tmp_path)
    second = engine_for(tmp_path)
    names = span_files(tmp_path)

    async def test(engine: Engine) -> None:
        await all_of(engine, tuple(reversed(PROMPT)))
        assert timings_of(await all_of(engine, PROMPT)).num_restored_tokens == NUM_BLOCKS * 16

    run(test, second)
    assert span_files(tmp_path) == names
    run(test, first)
    assert len(span_files(tmp_path)) == 2


def test_a_full_disk_ends_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(directory_module, "write_span", full)

    async def test(engine: Engine) -> None:
        await all_of(engine, PROMPT)
        async with asyncio.timeout(10):
            while (tier := engine.stats().scheduler.kv_tier) is None or tier.num_saving:
                await asyncio.sleep(0.005)
        await all_of(engine, tuple(reversed(PROMPT)))

    run(test, engine_for(tmp_path))
    assert not span_files(tmp_path)


def test_the_bound_is_kept_over_restarts(tmp_path: Path) -> None:
    prompts = [tuple(range(start, start + 200)) for start in (0, 200, 300)]

    async def test(engine: Engine) -> None:
        for prompt in prompts:
            await all_of(engine, prompt)

    run(test, engine_for(tmp_path))
    sizes = [path.stat().st_size for path in span_files(tmp_path)]
    assert len(sizes) == 3

    async def nothing(engine: Engine) -> None:
        return

    run(nothing, engine_for(tmp_path, kv_cache_disk_bytes=2 * max(sizes)))
    assert len(span_files(tmp_path)) == 2


def test_other_sizes_have_a_directory_of_their_own(tmp_path: Path) -> None:
    stored(tmp_path)
    found: list[Delta] = []

    async def test(engine: Engine) -> None:
        found.extend(await all_of(engine, PROMPT))

    run(test, engine_for(tmp_path, block_size=32))
    assert timings_of(found).num_cached_tokens == 0
    assert len(list(tmp_path.iterdir())) == 2


_WRITER = """
import sys
from pathlib import Path
from quickstep.core.resources.kv_tiers import SaveOrder, Span, TierBlock
from quickstep.engine.kv_files.directory import KVDirectory

directory = KVDirectory.open(Path(sys.argv[1]), "model", 1 << 20)
print("begun", flush=True)
for number in range(1_000_000):
    name, block = number.to_bytes(16, "big"), bytes([number % 256]) * (1 << 20)
    order = SaveOrder(Span(name.hex(), 0, (name,)), (TierBlock(name, name),), (), ())
    directory.write(order, [[block]])
    directory.remove([(number - 8).to_bytes(16, "big").hex()] if number > 8 else [])
"""


def test_a_killed_writer_leaves_no_torn_file_and_no_lock(tmp_path: Path) -> None:
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None and writer.stdout.readline() == "begun\n"
        end_s = time.monotonic() + 20
        while len(span_files(tmp_path)) < 3 and time.monotonic() < end_s:
            os.sched_yield()
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        directory = KVDirectory.open(tmp_path, "model", 1 << 20)
        assert directory.may_write
        spans = directory.spans()
        assert len(spans) >= 3
        for span in spans:
            (digest,) = span.digests
            place = memoryview(bytearray(1 << 20))
            piece = RestorePiece(span.name, 0, (TierBlock(digest, digest),), (0,))
            directory.read(piece, [[place]])
            assert set(place.tobytes()) == {digest[-1]}
        assert not list(tmp_path.glob("*/*.tmp"))
        directory.close()
