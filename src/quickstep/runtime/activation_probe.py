"""The memory of a device that the largest step needs next to weights and KV, measured.

Called when an engine opens on a GPU, before the KV cache takes the rest of its memory.
"""

from __future__ import annotations

import torch

from quickstep.model.interface import EmittingTokens, ForwardBatch, KVLayout, Model
from quickstep.model.sizing import StateMemory
from quickstep.ops.table import PagedLayout, RowLengths, StateRows
from quickstep.ops.tensors import torch_device
from quickstep.runtime.cache.kv_cache import allocate_kv


def measured_activation_bytes(
    model: Model,
    kv_layout: KVLayout,
    block_size: int,
    num_tokens: int,
    num_seqs: int,
    max_model_len: int,
) -> int:
    """The peak of a prefill step of `num_tokens`, in which `num_seqs` tokens get logits."""
    device = torch_device(model.device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_largest_step(model, kv_layout, block_size, num_tokens, num_seqs, max_model_len)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return int(peak - before)


@torch.inference_mode()
def run_largest_step(
    model: Model,
    kv_layout: KVLayout,
    block_size: int,
    num_tokens: int,
    num_seqs: int,
    max_model_len: int,
) -> None:
    """One step with the shapes of the largest; its results mean nothing.

    All rows use the same block, so that it needs no KV cache. Their block tables are as wide as
    those of the longest sequence, on which the scratch memory of attention depends.
    """
    device = torch_device(model.device)
    row_len = min(num_tokens, max_model_len)
    lengths = [row_len] * (num_tokens // row_len)
    lengths += [num_tokens % row_len] if num_tokens % row_len else []
    kv = allocate_kv(kv_layout, 1, block_size, model.device, StateMemory(len(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    width = -(-max_model_len // block_size)
    emitting = torch.arange(max(0, num_tokens - num_seqs), num_tokens, device=device)
    count = emitting.shape[0]

    def layout(
        positions: torch.Tensor, offsets: list[int], context_lens: tuple[int, ...]
    ) -> PagedLayout:
        return PagedLayout(
            positions=positions,
            slot_mapping=torch.zeros_like(positions),
            row_offsets=tuple(offsets),
            context_lens=context_lens,
            block_tables=torch.zeros(len(context_lens), width, dtype=torch.int32, device=device),
            block_size=block_size,
            lengths=RowLengths(torch.tensor(offsets, dtype=torch.int32, device=device)),
        )

    of_emitting = positions[emitting]
    contexts = tuple((of_emitting + 1).tolist())
    num_rows, none = len(lengths), (0,) * len(lengths)
    batch = ForwardBatch(
        torch.zeros(num_tokens, dtype=torch.int64, device=device),
        layout(positions, offsets, tuple(lengths)),
        EmittingTokens(emitting, layout(of_emitting, list(range(count + 1)), contexts)),
        state_rows=StateRows(tuple(offsets), (-1,) * num_rows, tuple(range(num_rows)), none, none)
        if kv.states
        else None,
    )
    hidden = model.forward(batch, kv)
    model.logits(hidden).max(1)  # type: ignore[union-attr]
