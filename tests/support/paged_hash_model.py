"""A model of a few lines that really reads the paged KV cache, for tests of the runtime.

Layer 0 stores each token's embedding, turned by its position, as K, and 1 as V. The hidden state
is the running sum of the K read back through the block table, so a wrong slot, block, position or
token changes the logits of every later token. Sums are sequential: the bits of a row do not depend
on its chunks or neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quickstep.model.interface import ForwardBatch, KVLayout
from quickstep.ops.reference import reference_ops
from quickstep.ops.table import KVCache, OpTable

HEAD_SIZE = 8


class PagedHashModel:
    def __init__(self, vocab_size: int = 64, max_model_len: int = 256, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self._embedding = torch.randn(vocab_size, HEAD_SIZE, generator=draw)
        self._unembedding = torch.randn(vocab_size, HEAD_SIZE, generator=draw)
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self.poison_token: int | None = None
        self.error: Exception | None = None

    @property
    def kv_layout(self) -> KVLayout:
        return KVLayout.uniform(
            num_layers=1, num_kv_heads=1, head_size=HEAD_SIZE, dtype=torch.float32
        )

    @property
    def ops(self) -> OpTable:
        return reference_ops()

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def fingerprint(self) -> str:
        return "paged-hash"

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        if self.error is not None:
            raise self.error
        hidden = self.every_token(batch, kv)
        return hidden if batch.emitting is None else hidden[batch.emitting.tokens]

    def every_token(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        layout = batch.layout
        turn = torch.cos(layout.positions.to(torch.float32) * 0.7)[:, None]
        keys = kv.keys[0].view(-1, HEAD_SIZE)
        keys[layout.slot_mapping] = self._embedding[batch.token_ids] * turn
        kv.values[0].view(-1, HEAD_SIZE)[layout.slot_mapping] = 1.0
        hidden = torch.empty(len(batch.token_ids), HEAD_SIZE)
        for row, context in enumerate(layout.context_lens):
            begin, end = layout.row_offsets[row], layout.row_offsets[row + 1]
            places = torch.arange(context)
            blocks = layout.block_tables[row].long()[places // layout.block_size]
            flat = blocks * layout.block_size + places % layout.block_size
            tail = layout.tails[row] if layout.tails else ()
            flat[context - len(tail) :] = torch.tensor(tail, dtype=torch.int64)
            hidden[begin:end] = torch.cumsum(keys[flat], dim=0)[context - (end - begin) :]
        if self.poison_token is not None:
            hidden[batch.token_ids == self.poison_token] = float("nan")
        return hidden

    def logits(self, hidden: Tensor, lora: object = None) -> Tensor:
        total = torch.zeros(hidden.shape[0], self._vocab_size)
        for dim in range(HEAD_SIZE):
            total += hidden[:, dim, None] * self._unembedding[None, :, dim]
        return total
