"""Bytes of files copied in chunks through two buffers."""

import pytest
import torch

from quickstep.model.checkpoint.staged_copy import StagedCopy


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 40, 41])
def test_every_byte_arrives_whatever_the_chunks(num_bytes):
    stored = bytes(range(num_bytes))
    chunks = []

    def read(memory, start):
        chunks.append(len(memory))
        memory[:] = stored[start : start + len(memory)]

    staged = StagedCopy(torch.device("cpu"), chunk_bytes=8)
    target = torch.zeros(num_bytes, dtype=torch.uint8)
    for _ in range(2):
        staged.fill_(target, read)
        assert bytes(target.tolist()) == stored
        target.zero_()
    assert max(chunks, default=0) <= 8
