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


def test_a_token_takes_no_huge_page_in_each_layer() -> None:
    layout = KVLayout(kv_groups([KVSize(2, 24)] * LAYERS), BFLOAT16, in_pairs=True)
    kv = allocate_kv(layout, BLOCKS, 16, CPU)
    assert len(kv.tensors) == 2 * LAYERS
    for array in map(to_numpy, kv.tensors):
        assert not np.any(array)
        flags = flags_at(int(array.ctypes.data))
        assert "nh" in flags, "never on huge pages, whatever the machine's setting is"
