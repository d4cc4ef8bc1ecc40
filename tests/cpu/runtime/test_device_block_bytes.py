"""KV blocks of a device, copied next to its steps: their bits, the order of steps and copies."""

from __future__ import annotations

import threading
from contextlib import suppress
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_copies import POISON, LateDevice
from msgspec.structs import replace
from torch import Tensor

from quickstep.config import CacheConfig, EngineConfig, LoadConfig
from quickstep.engine import assembly
from quickstep.errors import ConfigError, EngineError
from quickstep.model.interface import KVLayout, KVSize, kv_groups
from quickstep.ops.table import KVCache
from quickstep.ops.tensors import Device
from quickstep.runtime.cache import block_bytes
from quickstep.runtime.cache.block_bytes import HostBlockBytes, in_groups
from quickstep.runtime.cache.device_block_bytes import DeviceBlockBytes, _runs
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.cache.opening import open_block_bytes

SIZES = [KVSize(2, 8), KVSize(1, 12, has_values=False), KVSize(2, 8)]
NUM_BLOCKS = 12


def cache(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> KVCache:
    """A cache with other bytes in each block."""
    kv = allocate_kv(KVLayout(kv_groups(SIZES), dtype), NUM_BLOCKS, 4, torch.device("cpu"))
    for tensor in tensors(kv):
        noise = torch.randint(0, 255, bytes_of(tensor).shape, generator=seeded(seed))
        bytes_of(tensor).copy_(noise)
    return kv


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tensors(kv: KVCache) -> list[Tensor]:
    return [tensor for tensor in (*kv.keys, *kv.values) if isinstance(tensor, Tensor)]


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(tensor.shape[0], -1).view(torch.uint8)


def content(kv: KVCache, block_ids: Any = range(NUM_BLOCKS)) -> list[bytes]:
    """The bytes of blocks in the memory of the device."""
    host = HostBlockBytes(kv)
    with host.reading(block_ids) as blocks:
        return [b"".join(parts) for parts in blocks]


def read(blocks: DeviceBlockBytes, block_ids: Any) -> list[bytes]:
    with blocks.reading(block_ids) as found:
        return [b"".join(parts) for parts in found]


def write(blocks: DeviceBlockBytes, block_ids: Any, values: list[bytes]) -> None:
    with blocks.writing(block_ids) as places:
        for parts, value in zip(places, values, strict=True):
            start = 0
            for part in parts:
                part[:] = value[start : start + len(part)]
                start += len(part)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_both_forms_have_the_same_blocks(dtype: torch.dtype) -> None:
    kv, other = cache(dtype), cache(dtype, seed=1)
    host = open_block_bytes(kv)
    assert isinstance(host, HostBlockBytes)
    blocks, others = DeviceBlockBytes(kv, LateDevice()), DeviceBlockBytes(other, LateDevice())
    assert blocks.num_bytes == host.num_bytes
    for block_ids in [(3,), (0, 1, 2, 9), (9, 8, 2, 3), tuple(range(NUM_BLOCKS)), ()]:
        expected = content(kv, block_ids)
        assert read(blocks, block_ids) == expected
        with host.reading(block_ids) as parts, blocks.reading(block_ids) as copied:
            assert copied == parts
        write(others, block_ids, expected)
        assert content(other, block_ids) == expected
    assert content(other) == content(kv)


def test_caches_of_other_forms_have_other_fingerprints() -> None:
    found = {
        DeviceBlockBytes(cache(dtype), LateDevice()).fingerprint(model)
        for dtype in (torch.bfloat16, torch.float32)
        for model in ("a", "b")
    }
    assert len(found) == 4


def test_blocks_that_follow_each_other_are_one_copy_of_each_layer() -> None:
    assert list(_runs((4, 5, 6, 2, 1, 7, 8))) == [(0, 4, 3), (3, 2, 1), (4, 1, 1), (5, 7, 2)]
    assert list(_runs(())) == []
    device = LateDevice()
    read(DeviceBlockBytes(cache(), device), (4, 5, 6, 9))
    assert device.num_copies == 2 * 5  # two runs of K, V, K, K, V


def test_groups_have_at_most_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = DeviceBlockBytes(cache(), LateDevice())
    monkeypatch.setattr(block_bytes, "_BYTES_AT_ONCE", 5 * blocks.num_bytes + 1)
    assert list(in_groups(blocks, range(12))) == [range(5), range(5, 10), range(10, 12)]
    monkeypatch.setattr(block_bytes, "_BYTES_AT_ONCE", 1)
    assert list(in_groups(blocks, (7, 8))) == [(7,), (8,)]
    assert list(in_groups(blocks, ())) == []


def filling(kv: KVCache, block_id: int, value: int) -> list[Any]:
    """A step that writes a block, layer by layer."""
    return [lambda t=t: bytes_of(t)[block_id].fill_(value) for t in tensors(kv)]


@pytest.mark.parametrize("seed", range(20))
def test_copies_and_steps_in_any_order_see_each_other_complete(seed: int) -> None:
    """A read has what the steps launched before have written, all layers of it. A written block has
    its content for the steps after, and stays as it is: steps launched before it, of sequences that
    were aborted, write to it first.
    """
    rng = Random(seed)
    kv, device = cache(seed=seed), LateDevice(rng)
    blocks = DeviceBlockBytes(kv, device)
    expected = content(kv)
    size = blocks.num_bytes
    for _ in range(60):
        ids = tuple(rng.sample(range(NUM_BLOCKS), rng.randint(1, 5)))
        match rng.choice(["step", "step", "read", "write", "sees", "synchronize"]):
            case "step":
                value = rng.randrange(256)
                device.launch(*filling(kv, ids[0], value))
                expected[ids[0]] = bytes([value]) * size
            case "read":
                assert read(blocks, ids) == [expected[block_id] for block_id in ids]
            case "write":
                values = [rng.randbytes(size) for _ in ids]
                write(blocks, ids, values)
                expected = [*expected]
                for block_id, value in zip(ids, values, strict=True):
                    expected[block_id] = value
            case "sees":
                seen: list[bytes] = []
                device.launch(lambda seen=seen: seen.extend(content(kv)))
                device.synchronize()
                assert seen == expected
            case _:
                device.synchronize()
    device.synchronize()
    assert content(kv) == expected


def test_a_block_that_is_being_written_is_complete_when_the_context_has_ended() -> None:
    kv, other = cache(), cache(seed=1)
    blocks = DeviceBlockBytes(kv, LateDevice())
    before, values = content(kv), content(other, (2, 3))
    with blocks.writing((2, 3)) as places:
        for parts, value in zip(places, values, strict=True):
            parts[0][:] = value[: len(parts[0])]
        assert content(kv) == before
        for parts, value in zip(places, values, strict=True):
            start = 0
            for part in parts:
                part[:] = value[start : start + len(part)]
                start += len(part)
    assert content(kv, (2, 3)) == values
    assert content(kv, (1, 4)) == [before[1], before[4]]


def test_content_that_did_not_come_is_not_copied() -> None:
    kv, device = cache(), LateDevice()
    blocks, before = DeviceBlockBytes(kv, device), content(kv)
    with suppress(OSError), blocks.writing((1, 2)) as places:
        places[0][0][:] = bytes(len(places[0][0]))
        raise OSError
    assert (content(kv), device.num_copies) == (before, 0)


class StuckDevice(LateDevice):
    """Its copies do not end before `may_end`, and fail if `fails`."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()
        self.is_waiting = threading.Event()
        self.fails = False

    def copy(self, target: Tensor, source: Tensor) -> None:
        if self.fails and self.num_copies:
            raise RuntimeError("a copy failed")
        super().copy(target, source)

    def wait(self) -> None:
        self.is_waiting.set()
        assert self.may_end.wait(20)
        super().wait()


@pytest.mark.parametrize("is_read", [True, False])
def test_steps_wait_for_no_copy(is_read: bool) -> None:
    kv, device = cache(), StuckDevice()
    blocks = DeviceBlockBytes(kv, device)
    expected, other = content(kv), content(cache(seed=1), (0,))
    found: list[bytes] = []

    def move() -> None:
        if is_read:
            found.extend(read(blocks, (0, 1)))
        else:
            write(blocks, (0,), other)

    mover = threading.Thread(target=move)
    mover.start()
    assert device.is_waiting.wait(20)
    seen: list[bytes] = []
    device.launch(*filling(kv, 5, 7), lambda: seen.extend(content(kv)))
    device.synchronize()
    assert seen[5] == bytes([7]) * blocks.num_bytes
    assert seen[:5] == expected[:5]  # what is being written is not there yet
    device.may_end.set()
    mover.join(20)
    assert found == (expected[:2] if is_read else [])
    assert content(kv, (0,)) == ([expected[0]] if is_read else other)


def test_what_moves_slowly_has_host_memory_of_its_own() -> None:
    """A reader that waits for its socket keeps its bytes, and delays no other."""
    kv = cache()
    blocks = DeviceBlockBytes(kv, LateDevice())
    with blocks.reading((0,)) as first, blocks.writing((1,)) as second:
        assert read(blocks, (2,)) == content(kv, (2,))
        for part in second[0]:
            part[:] = bytes(len(part))
        assert b"".join(first[0]) == content(kv, (0,))[0]
    assert content(kv, (1,)) == [bytes(blocks.num_bytes)]
    assert len(blocks._free) == 3
    with blocks.reading((4,)):
        assert len(blocks._free) == 2  # one of them again


def test_copies_that_were_queued_are_waited_for_when_one_fails() -> None:
    """Else the memory would be used again while the device still writes to it."""
    device = StuckDevice()
    device.fails = True
    device.may_end.set()
    with pytest.raises(EngineError, match="KV blocks are not copied: a copy failed"):
        read(DeviceBlockBytes(cache(), device), (0, 3))
    assert device.is_waiting.is_set()
    assert not device._copies


def test_host_memory_is_not_read_before_a_copy_has_ended() -> None:
    """The double's memory is poisoned, so that the tests above would see it."""
    memory = LateDevice().host_memory(3)
    assert memory.tolist() == [POISON] * 3


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_gpu_may_move_its_blocks_and_the_log_says_that_none_has(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(cache=CacheConfig(kv_cache_dir="kv"))
    planned: Any = SimpleNamespace(device=Device(device))
    assembly._check_moved_kv(config, planned, "stored KV blocks", "--kv-cache-dir")
    assert ("which no GPU has run yet" in caplog.text) == (device == "cuda")
    divided = replace(config, load=LoadConfig(tensor_parallel_size=2))
    with pytest.raises(ConfigError, match="need engines of one process"):
        assembly._check_moved_kv(divided, planned, "stored KV blocks", "--kv-cache-dir")
