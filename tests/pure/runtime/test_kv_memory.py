"""Where the KV cache of a CPU is in memory."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from quickstep.model.decoder_spec import KVSize, kv_groups
from quickstep.model.interface import KVLayout
from quickstep.ops.tensors import BFLOAT16, CPU, to_numpy
from quickstep.runtime.cache.kv_cache import allocate_kv

LAYERS, BLOCKS = 5, 301


def flags_at(address: int) -> list[str]:
    """The kernel's flags of the mapping that has an address (`VmFlags`, proc_pid_smaps(5))."""
    mapped = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            mapped = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif mapped and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:x}")


def test_the_cache_may_be_on_huge_pages_from_its_first_byte() -> None:
    layout = KVLayout(kv_groups([KVSize(2, 24)] * LAYERS), BFLOAT16, in_pairs=True)
    kv = allocate_kv(layout, BLOCKS, 16, CPU)
    arrays = sorted(map(to_numpy, kv.tensors), key=lambda array: int(array.ctypes.data))
    assert len(arrays) == 2 * LAYERS
    addresses = [array.ctypes.data for array in arrays]
    assert addresses[0] % (2 << 20) == 0
    assert all(address % 64 == 0 for address in addresses)
    for first, second, array in zip(addresses, addresses[1:], arrays, strict=False):
        assert first + array.nbytes <= second < first + array.nbytes + 64
    for address in addresses:
        flags = flags_at(address)
        assert "hg" in flags, "advised to be on huge pages"
        assert "sh" not in flags, "shared memory has its own setting, which is usually off"
    assert not any(np.any(array) for array in arrays)
    arrays[0][...] = 1
    assert not np.any(arrays[1])
