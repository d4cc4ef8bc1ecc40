"""Opens a draft model or an EAGLE layer: finds it before memory is planned, loads it next to its
target.

Called by the assembly of an engine. Everything that can be wrong with the checkpoint is a
ConfigError here, before the server listens.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quickstep.config import LoadConfig
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.tensor_schema import num_parameters
from quickstep.model.sizing import DraftSizes, ElementBytes

if TYPE_CHECKING:
    from quickstep.engine.text.tokenizer import Tokenizer
    from quickstep.model.checkpoint.source import Checkpoint
    from quickstep.model.decoder_spec import ModelSpec
    from quickstep.model.eagle import EagleSpec
    from quickstep.model.interface import Model
    from quickstep.model.sizing import MemoryPlan
    from quickstep.ops.table import OpTable
    from quickstep.runtime.speculation.draft_model import DraftModelProposer
    from quickstep.runtime.speculation.eagle import EagleProposer
    from quickstep.runtime.speculation.vocabulary import DraftVocabulary

__all__ = [
    "FoundDraft",
    "eagle_sizes",
    "find_draft",
    "find_eagle",
    "load_draft",
    "medusa_sizes",
    "open_eagle",
]


class FoundDraft(msgspec.Struct, frozen=True):
    """A draft model's checkpoint. `load` names it; `sizes` are for the memory plan."""

    load: LoadConfig
    checkpoint: Checkpoint
    spec: ModelSpec
    sizes: DraftSizes


def find_draft(load: LoadConfig, ops: OpTable) -> FoundDraft:
    """Find and check a draft model for the target's op table. Raises ConfigError."""
    from quickstep.model.checkpoint.placement import choose_dtype
    from quickstep.model.checkpoint.source import find_checkpoint
    from quickstep.model.checkpoint.weights import open_checkpoint_files, open_weights
    from quickstep.model.loader import check_requantization
    from quickstep.model.spec import read_spec

    checkpoint = find_checkpoint(load)
    spec = read_spec(checkpoint.path)
    if not spec.native:
        raise ConfigError(
            f"the draft model {checkpoint.name} is a {spec.architecture}, which runs through "
            "transformers; use a draft model of a native architecture"
        )
    dtype = choose_dtype(load.dtype, spec, open_checkpoint_files(checkpoint.path))
    weights = open_weights(checkpoint.path, spec)
    check_requantization(weights, load.quantization)
    held_bytes = weights.held_bytes(dtype.itemsize) if weights.quantized else None
    elements = ElementBytes(
        dtype.itemsize, ops.scratch_bytes, load.quantization, weights=held_bytes
    )
    return FoundDraft(load, checkpoint, spec, DraftSizes(spec, elements))


def load_draft(
    found: FoundDraft,
    target: Model,
    target_path: Path | None,
    ops: OpTable,
    plan: MemoryPlan,
    block_size: int,
    enforce_eager: bool = False,
) -> DraftModelProposer:
    """Load the draft model of `target`, whose checkpoint is at `target_path`; without one, its
    token ids are taken to be the same.

    Raises:
        ConfigError: The checkpoint is broken, or has another vocabulary.
    """
    from quickstep.engine.text.tokenizer import Tokenizer
    from quickstep.model.checkpoint.weights import open_weights
    from quickstep.model.loader import load_model, reason_for_torch
    from quickstep.ops.torch_import import require_torch
    from quickstep.runtime.kv_cache import allocate_kv
    from quickstep.runtime.speculation.draft_model import DraftModelProposer

    checkpoint, spec = found.checkpoint, found.spec
    why_torch = "--enforce-eager"
    if not enforce_eager:
        why_torch = reason_for_torch(open_weights(checkpoint.path, spec), ops, found.load)
    if why_torch:
        require_torch(f"{why_torch} of the draft model")
    vocabulary = None
    if target_path is not None and not _same_file(
        target_path / "tokenizer.json", checkpoint.path / "tokenizer.json"
    ):
        tokenizers = Tokenizer.open(target_path), Tokenizer.open(checkpoint.path)
        vocabulary = _vocabulary(*tokenizers, (target.vocab_size, spec.vocab_size))
    model = load_model(
        checkpoint, spec, ops, found.load, None, plan.max_model_len, on_host=not why_torch
    )
    kv = allocate_kv(model.kv_shape, plan.num_blocks, block_size, model.device)
    return DraftModelProposer(
        model,
        kv,
        block_size,
        target.vocab_size,
        vocabulary,
        plan.max_num_batched_tokens,
        enforce_eager,
    )


def find_eagle(load: LoadConfig, target: ModelSpec, is_fused: bool) -> tuple[Checkpoint, EagleSpec]:
    """Find and check an EAGLE layer for a target; EAGLE 3 if `is_fused`. Raises ConfigError."""
    from quickstep.model.checkpoint.source import find_checkpoint
    from quickstep.model.eagle import read_eagle_spec

    if load.quantization is not None:
        raise ConfigError(
            f"quantization is {load.quantization}, but an EAGLE layer keeps its dtype; leave it out"
        )
    if not target.native:
        raise ConfigError(
            f"an EAGLE layer needs a model of a native architecture, {target.architecture} runs "
            "through transformers; use --speculative-method suffix"
        )
    checkpoint = find_checkpoint(load)
    return checkpoint, read_eagle_spec(checkpoint.path, target, is_fused)


def eagle_sizes(spec: EagleSpec, dtype_bytes: int, ops: OpTable, block_size: int) -> DraftSizes:
    """What an EAGLE layer needs of the memory."""
    from quickstep.runtime.speculation.eagle import num_scratch_blocks

    weight_bytes = num_parameters(spec.decoder) * dtype_bytes
    elements = ElementBytes(dtype_bytes, ops.scratch_bytes, weights=weight_bytes)
    return DraftSizes(spec.decoder, elements, num_scratch_blocks(1, block_size) * block_size)


def medusa_sizes(load: LoadConfig, dtype_bytes: int, ops: OpTable) -> DraftSizes:
    """What Medusa heads need of the memory. Raises ConfigError."""
    from quickstep.model.checkpoint.source import find_checkpoint
    from quickstep.model.checkpoint.weights import open_checkpoint_files

    tensors = open_checkpoint_files(find_checkpoint(load).path).tensors.values()
    num_parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    elements = ElementBytes(dtype_bytes, ops.scratch_bytes, weights=num_parameters * dtype_bytes)
    return DraftSizes(None, elements)


def open_eagle(
    load: LoadConfig,
    target: Model,
    is_fused: bool,
    plan: MemoryPlan,
    block_size: int,
    enforce_eager: bool = False,
) -> EagleProposer:
    """Load the EAGLE layer of a target. Raises ConfigError."""
    from quickstep.model.decoder import Decoder
    from quickstep.model.eagle import load_eagle
    from quickstep.runtime.kv_cache import allocate_kv
    from quickstep.runtime.speculation.eagle import EagleProposer, num_scratch_blocks

    assert isinstance(target, Decoder), "a native architecture, as `find_eagle` checked"
    checkpoint, spec = find_eagle(load, target.spec, is_fused)
    model = load_eagle(checkpoint.path, spec, target, plan.max_model_len)
    num_blocks = plan.num_blocks + num_scratch_blocks(plan.max_num_seqs, block_size)
    kv = allocate_kv(model.kv_shape, num_blocks, block_size, model.device)
    return EagleProposer(target, model, kv, plan.num_blocks, block_size, enforce_eager)


def _same_file(first: Path, second: Path) -> bool:
    try:
        return first.read_bytes() == second.read_bytes()
    except OSError:  # a GGUF file has its tokenizer inside
        return False


def _vocabulary(
    target: Tokenizer, draft: Tokenizer, vocab_sizes: tuple[int, int]
) -> DraftVocabulary | None:
    from quickstep.runtime.speculation.vocabulary import map_vocabulary

    target_size, draft_size = vocab_sizes
    return map_vocabulary(
        [target.piece(token_id) for token_id in range(target_size)],
        [draft.piece(token_id) for token_id in range(draft_size)],
        fallback_id=min(draft.eos_token_ids, default=0),
    )
