"""Which implementation runs a model's steps: the one place that knows them all.

Called by `runtime.runner` and by proposers that run a model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from quickstep.model.decoder import Decoder
from quickstep.model.encoders.encoder import Encoder
from quickstep.model.interface import FeatureModel, Model
from quickstep.ops.table import KVCache, LoRAAdapter
from quickstep.ops.tensors import Device, torch_device
from quickstep.runtime.steps.captured import CapturedSteps, Recordings, record
from quickstep.runtime.steps.step_model import GraphOptions, StepModel
from quickstep.runtime.steps.texts import TextSteps

_LOGGER = logging.getLogger(__name__)

# Products take longer than launches in a longer step, and padding adds to them. An estimate.
_MAX_PROMPT_TOKENS = 512


def device_graphs(
    model: Model, kv: KVCache, num_slots: int, max_width: int, max_num_batched_tokens: int
) -> GraphOptions | None:
    """CUDA graphs of a model's decode steps and of short ones with prompts; None where they cannot
    be recorded. `kv` has a block more than the pool.
    """
    if model.device.type != "cuda" or not model.ops.reads_lengths:
        return None
    if model.ops.ranks is not None:
        _LOGGER.info("ranks on GPUs run their steps op by op, without CUDA graphs")
        return None
    # Imported here: it computes with torch.
    from quickstep.runtime.steps.graphs import CudaGraphs, can_record

    if not can_record(model, kv):
        return None
    backend = CudaGraphs(torch_device(model.device))
    max_prompt_tokens = min(_MAX_PROMPT_TOKENS, max_num_batched_tokens)
    return GraphOptions(backend, num_slots, max_width, max_prompt_tokens)


def open_steps(
    model: Model,
    kv: KVCache,
    block_size: int,
    enforce_eager: bool,
    adapters: Mapping[str, LoRAAdapter] | None = None,
    aux_layers: tuple[int, ...] = (),
    num_features: int = 0,
    graphs: GraphOptions | None = None,
) -> StepModel:
    """Captured steps where the model can be recorded, otherwise its Python, op by op. With
    `graphs`, `kv` has a block more than the pool.

    `adapters` are those that rows may name, as they are when a step is prepared; None if rows never
    have one, so that nothing of a step is about adapters. `aux_layers` are those of a decoder whose
    inputs are results as well; `num_features` is N of an `FeatureModel`, else 0.
    """
    if isinstance(model, Decoder | FeatureModel) and not enforce_eager and model.ops.steps:
        with_lora = adapters is not None
        of = partial(record, model, kv, block_size, with_lora=with_lora, num_features=num_features)
        of_emitting = of(every_token=False, aux_layers=aux_layers)
        if of_emitting is not None:
            of_all = partial(of, every_token=True, aux_layers=aux_layers)
            recordings = Recordings(of_emitting, of_all)
            return CapturedSteps(model, model.ops.steps, recordings, kv, block_size, adapters)
    if isinstance(model, Encoder) and isinstance(model.device, Device):
        return TextSteps(model)
    # Imported here: they compute with torch.
    from quickstep.runtime.steps.eager import EagerSteps

    if isinstance(model, Decoder) and graphs is not None and not enforce_eager:
        from quickstep.runtime.steps.graphs import GraphSteps, can_record

        if can_record(model, kv):
            return GraphSteps(model, kv, block_size, adapters, aux_layers, graphs)
    if isinstance(model, Decoder) and (model.ops.ranks is not None or model.stage.size > 1):
        from quickstep.runtime.steps.eager_calls import EagerCalls

        return EagerCalls(model, kv, block_size, adapters, aux_layers)
    return EagerSteps(model, kv, block_size, adapters, aux_layers)
