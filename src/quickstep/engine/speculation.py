"""What an engine drafts with: n-grams, suffixes, a draft model, EAGLE and prediction layers, heads.

Called by the assembly of an engine: `draft_sizes` before memory is planned, `open_proposer` once
the target is loaded. Everything that can be wrong with a checkpoint is a ConfigError here, before
the server listens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from quickstep.config import EngineConfig, LoadConfig, SpeculationMethod
from quickstep.errors import ConfigError
from quickstep.model.sizing import DraftSizes, ElementBytes
from quickstep.ops.tensors import CPU

if TYPE_CHECKING:
    from quickstep.model.checkpoint.source import Checkpoint
    from quickstep.model.decoder import Decoder
    from quickstep.model.decoder_spec import ModelSpec
    from quickstep.model.eagle import EagleSpec
    from quickstep.model.interface import FeatureModel, Model
    from quickstep.model.mtp import MtpSpec
    from quickstep.model.sizing import MemoryPlan
    from quickstep.ops.table import OpTable
    from quickstep.runtime.speculation.draft_model import DraftModelProposer
    from quickstep.runtime.speculation.eagle import EagleProposer
    from quickstep.runtime.speculation.proposer import Proposer
    from quickstep.runtime.speculation.vocabulary import DraftVocabulary
    from quickstep.text.tokenizer import Tokenizer

_EAGLE = (SpeculationMethod.EAGLE, SpeculationMethod.EAGLE3)


class DraftCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint that drafts, and as what."""

    method: SpeculationMethod
    load: LoadConfig


def draft_sizes(
    config: EngineConfig, target: ModelSpec, dtype_bytes: int, scratch_bytes: int
) -> tuple[DraftSizes, ...]:
    """What each model that drafts needs of the memory next to a target. Raises ConfigError."""
    block_size = config.cache.block_size
    found = []
    for draft in draft_checkpoints(config, target):
        sizes = sizes_of(draft, target, dtype_bytes, scratch_bytes, block_size)
        if config.load.num_ranks > 1 and draft.method is not SpeculationMethod.DRAFT:
            # a second embedding and output projection (`_drafted_target`)
            outer_bytes = 2 * target.vocab_size * target.hidden_size * dtype_bytes
            elements = replace(sizes.elements, weights=sizes.weight_bytes + outer_bytes)
            sizes = replace(sizes, elements=elements)
        found.append(sizes)
    return tuple(found)


def sizes_of(
    one: DraftCheckpoint, target: ModelSpec, dtype_bytes: int, scratch_bytes: int, block_size: int
) -> DraftSizes:
    """What a checkpoint needs of the memory next to a target, whose elements have so many bytes and
    whose ops have so many of scratch. Raises ConfigError.
    """
    if one.method is SpeculationMethod.MEDUSA:
        return _medusa_sizes(one.load, dtype_bytes, scratch_bytes)
    if one.method in _EAGLE:
        _, layer = _find_eagle(one.load, target, one.method is SpeculationMethod.EAGLE3)
        return _layer_sizes(layer.decoder, None, dtype_bytes, scratch_bytes, block_size)
    if one.method is SpeculationMethod.MTP:
        mtp = _find_mtp(one.load, target, dtype_bytes)
        return _layer_sizes(mtp.decoder, mtp.num_bytes, dtype_bytes, scratch_bytes, block_size)
    return find_draft(one.load, scratch_bytes).sizes


def open_proposer(
    config: EngineConfig, model: Model, plan: MemoryPlan, path: Path | None
) -> Proposer | None:
    """What drafts for `model`, whose checkpoint is at `path`. Raises ConfigError."""
    from quickstep.runtime.speculation.combined import CombinedProposer
    from quickstep.runtime.speculation.methods import open_lookup_proposers

    free = open_lookup_proposers(config.speculation)
    models = open_model_proposers(config, model, plan, path)
    opened = [*free, *models]
    if len(opened) > 1:
        return CombinedProposer(free, models, time.perf_counter)
    return opened[0] if opened else None


def open_model_proposers(
    config: EngineConfig, model: Model, plan: MemoryPlan, path: Path | None
) -> list[Proposer]:
    """What drafts with a checkpoint, each of another name. Raises ConfigError."""
    from quickstep.model.decoder import Decoder

    target = model.spec if isinstance(model, Decoder) else None
    drafts = draft_checkpoints(config, target)
    return [_open_model(draft, config, model, plan, path) for draft in drafts]


def draft_checkpoints(config: EngineConfig, target: ModelSpec | None) -> list[DraftCheckpoint]:
    """The checkpoints that draft for a target; of the method `auto`, it is found out, also for the
    target's own, which may have a prediction layer. None for a target that can have none. Raises
    ConfigError.
    """
    found = []
    if uses_prediction_layer(config, target):
        found.append(DraftCheckpoint(SpeculationMethod.MTP, config.load))
    for proposer in config.speculation.proposers:
        if proposer.model is None:
            continue
        load = replace(
            config.load,
            model=proposer.model,
            revision=proposer.revision,
            quantization=proposer.quantization,
        )
        method = _method_of(load) if proposer.method is SpeculationMethod.AUTO else proposer.method
        found.append(DraftCheckpoint(method, load))
    check_methods([(draft.method, draft.load.model) for draft in found])
    return found


def uses_prediction_layer(config: EngineConfig, target: ModelSpec | None) -> bool:
    """Whether the prediction layer of a target's checkpoint drafts: it is requested, or there is
    one and the method is `auto`. On a GPU, each step would copy hidden states to the host, also
    where they are of no use, so there it has to be requested.
    """
    methods = {proposer.method for proposer in config.speculation.proposers}
    if SpeculationMethod.AUTO not in methods or SpeculationMethod.MTP in methods:
        return SpeculationMethod.MTP in methods
    if target is None or not target.num_prediction_layers:
        return False
    from quickstep.model.checkpoint.placement import choose_device
    from quickstep.model.checkpoint.source import find_checkpoint
    from quickstep.model.mtp import has_prediction_layer

    is_on_cpu = choose_device(config.load.device) == CPU
    return is_on_cpu and has_prediction_layer(find_checkpoint(config.load).path, target)


def aux_layers(config: EngineConfig, target: ModelSpec) -> tuple[int, ...]:
    """Layers of a target whose inputs its EAGLE 3 layer reads, ascending. Raises ConfigError."""
    found: set[int] = set()
    for draft in draft_checkpoints(config, target):
        if draft.method is SpeculationMethod.EAGLE3:
            found.update(_find_eagle(draft.load, target, is_fused=True)[1].aux_layers)
    return tuple(sorted(found))


def check_methods(models: Sequence[tuple[SpeculationMethod, str]]) -> None:
    """Of these models, each is of another method. Raises ConfigError."""
    names: dict[SpeculationMethod, str] = {}
    for method, name in models:
        if method in names:
            raise ConfigError(
                f"--speculative-model {names[method]} and {name} are both of the method "
                f"{method.value}; keep one of them"
            )
        names[method] = name


def _method_of(load: LoadConfig) -> SpeculationMethod:
    """What a checkpoint can be used for. Raises ConfigError."""
    from quickstep.model.checkpoint.source import find_checkpoint
    from quickstep.model.checkpoint.weights import open_checkpoint_files
    from quickstep.runtime.speculation.methods import method_of_tensors

    return method_of_tensors(open_checkpoint_files(find_checkpoint(load).path).tensors)


def _open_model(
    one: DraftCheckpoint, config: EngineConfig, model: Model, plan: MemoryPlan, path: Path | None
) -> Proposer:
    from quickstep.model.checkpoint.source import find_checkpoint
    from quickstep.model.decoder import Decoder

    method, load, block_size = one.method, one.load, config.cache.block_size
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"--speculative-method {method.value} needs a model of a native architecture; "
            "use --speculative-method suffix"
        )
    # a state is of one chain of tokens
    width = 1 if model.kv_layout.states else config.speculation.tree_width
    if method is not SpeculationMethod.DRAFT:
        model = _drafted_target(config, model)
    if method is SpeculationMethod.MEDUSA:
        from quickstep.runtime.speculation.medusa import MedusaProposer, load_medusa

        heads = load_medusa(find_checkpoint(load).path, model)
        return MedusaProposer(model, heads, width)
    if method in _EAGLE:
        is_fused = method is SpeculationMethod.EAGLE3
        return open_eagle(load, model, is_fused, plan, block_size, config.enforce_eager, width)
    if method is SpeculationMethod.MTP:
        from quickstep.model.mtp import load_mtp

        layer = load_mtp(find_checkpoint(load).path, model, load, plan.max_model_len)
        return _open_layer(layer, model, plan, block_size, config.enforce_eager, width)
    found = find_draft(load, model.ops.scratch_bytes)
    ops = replace(model.ops, ranks=None)  # only rank 0 drafts
    return load_draft(found, model, path, ops, plan, block_size, config.enforce_eager)


def _drafted_target(config: EngineConfig, model: Decoder) -> Decoder:
    """The target as an EAGLE layer and Medusa heads read it: its complete embedding and output
    projection, also where several processes have them. Only the engine's process drafts.
    """
    if model.ops.ranks is None and model.stage.size == 1:
        return model
    from quickstep.model.checkpoint.source import find_checkpoint
    from quickstep.model.loader import without_layers

    return without_layers(find_checkpoint(config.load), model, config.load)


class FoundDraft(msgspec.Struct, frozen=True):
    """A draft model's checkpoint. `load` names it; `sizes` are for the memory plan."""

    load: LoadConfig
    checkpoint: Checkpoint
    spec: ModelSpec
    sizes: DraftSizes


def find_draft(load: LoadConfig, scratch_bytes: int) -> FoundDraft:
    """Find and check a draft model; `scratch_bytes` are those of its ops. Raises ConfigError."""
    from quickstep.model.checkpoint.placement import choose_device, choose_dtype
    from quickstep.model.checkpoint.source import find_checkpoint
    from quickstep.model.checkpoint.weights import open_checkpoint_files
    from quickstep.model.loader import quantized_weight_bytes
    from quickstep.model.spec import read_spec

    checkpoint = find_checkpoint(load)
    spec = read_spec(checkpoint.path)
    if not spec.native:
        raise ConfigError(
            f"the draft model {checkpoint.name} is a {spec.architecture}, which runs through "
            "transformers; use a draft model of a native architecture"
        )
    dtype = choose_dtype(load.dtype, spec, open_checkpoint_files(checkpoint.path))
    sizes = checkpoint.path, spec, load.quantization, dtype.itemsize
    natively = choose_device(load.device) == CPU
    held_bytes = quantized_weight_bytes(*sizes, natively=natively)
    elements = ElementBytes(dtype.itemsize, scratch_bytes, load.quantization, weights=held_bytes)
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
    from quickstep.model.loader import load_model, reason_for_torch
    from quickstep.ops.torch_import import require_torch
    from quickstep.runtime.cache.kv_cache import allocate_kv
    from quickstep.runtime.speculation.draft_model import MAX_NEW_TOKENS, DraftModelProposer
    from quickstep.text.tokenizer import Tokenizer

    checkpoint, spec = found.checkpoint, found.spec
    if spec.state_sizes:
        raise ConfigError(
            f"--speculative-model {found.load.model} is {spec.architecture}, whose layers keep "
            "states: it cannot draft; choose a model with attention in every layer"
        )
    why_torch = "--enforce-eager"
    if not enforce_eager:
        why_torch = reason_for_torch(ops, found.load)
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
    kv = allocate_kv(model.kv_layout, plan.num_blocks, block_size, model.device)
    return DraftModelProposer(
        model,
        kv,
        block_size,
        target.vocab_size,
        vocabulary,
        min(plan.max_num_batched_tokens, MAX_NEW_TOKENS),
        enforce_eager,
    )


def _find_eagle(
    load: LoadConfig, target: ModelSpec, is_fused: bool
) -> tuple[Checkpoint, EagleSpec]:
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


def _find_mtp(load: LoadConfig, target: ModelSpec, dtype_bytes: int) -> MtpSpec:
    """Find and check the prediction layer of a target. Raises ConfigError."""
    from quickstep.model.checkpoint.placement import choose_device
    from quickstep.model.checkpoint.source import find_checkpoint
    from quickstep.model.mtp import read_mtp_spec

    natively = choose_device(load.device) == CPU
    path = find_checkpoint(load).path
    return read_mtp_spec(path, target, dtype_bytes, load.quantization, natively=natively)


def planned_mtp(target: ModelSpec, elements: ElementBytes, block_size: int) -> DraftSizes:
    """What the prediction layer of a model needs of the memory, by its config only. Raises
    ConfigError.
    """
    from quickstep.model.mtp import can_have_layer, layer_of_target, planned_bytes

    if not (target.num_prediction_layers and can_have_layer(target)):
        raise ConfigError(
            f"the config of this {target.architecture} counts no prediction layer; leave "
            "--speculative-method mtp out"
        )
    layer = layer_of_target(target)
    num_bytes = planned_bytes(layer, elements.dtype, elements.quantization)
    return _layer_sizes(layer, num_bytes, elements.dtype, elements.scratch, block_size)


def _layer_sizes(
    layer: ModelSpec, num_bytes: int | None, dtype_bytes: int, scratch_bytes: int, block_size: int
) -> DraftSizes:
    """What an EAGLE or a prediction layer needs of the memory; `num_bytes` of weights, None for as
    many as its parameters have.
    """
    from quickstep.runtime.speculation.eagle import num_scratch_blocks

    elements = ElementBytes(dtype_bytes, scratch_bytes, weights=num_bytes)
    return DraftSizes(layer, elements, num_scratch_blocks(1, block_size) * block_size)


def _medusa_sizes(load: LoadConfig, dtype_bytes: int, scratch_bytes: int) -> DraftSizes:
    """What Medusa heads need of the memory. Raises ConfigError."""
    from quickstep.model.checkpoint.source import find_checkpoint
    from quickstep.model.checkpoint.weights import open_checkpoint_files
    from quickstep.runtime.speculation.medusa import num_medusa_heads

    tensors = open_checkpoint_files(find_checkpoint(load).path).tensors
    weight_bytes = dtype_bytes * sum(math.prod(tensor.shape) for tensor in tensors.values())
    elements = ElementBytes(dtype_bytes, scratch_bytes, weights=weight_bytes)
    return DraftSizes(None, elements, num_heads=num_medusa_heads(tensors))


def open_eagle(
    load: LoadConfig,
    target: Model,
    is_fused: bool,
    plan: MemoryPlan,
    block_size: int,
    enforce_eager: bool = False,
    tree_width: int = 1,
) -> EagleProposer:
    """Load the EAGLE layer of a target. Raises ConfigError."""
    from quickstep.model.decoder import Decoder
    from quickstep.model.eagle import load_eagle

    assert isinstance(target, Decoder), "a native architecture, as `_find_eagle` checked"
    checkpoint, spec = _find_eagle(load, target.spec, is_fused)
    model = load_eagle(checkpoint.path, spec, target, plan.max_model_len)
    return _open_layer(model, target, plan, block_size, enforce_eager, tree_width)


def _open_layer(
    model: FeatureModel,
    target: Decoder,
    plan: MemoryPlan,
    block_size: int,
    enforce_eager: bool,
    tree_width: int,
) -> EagleProposer:
    """What drafts with a layer that reads the hidden states of a target."""
    from quickstep.runtime.cache.kv_cache import allocate_kv
    from quickstep.runtime.speculation.eagle import EagleProposer, num_scratch_blocks

    num_blocks = plan.num_blocks + num_scratch_blocks(plan.max_num_seqs, block_size)
    kv = allocate_kv(model.kv_layout, num_blocks, block_size, model.device)
    return EagleProposer(target, model, kv, plan.num_blocks, block_size, enforce_eager, tree_width)


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
