"""What is measured: a live engine, and what has to be known of its model to judge the figures.

A checkpoint opens as everywhere else. A shape gets random weights and a made-up vocabulary in
memory, through the same planning, packing and wiring; there is no file.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping

import msgspec
import tokenizers
import torch

from quickstep.bench.kernel_clock import with_kernel_clock
from quickstep.bench.work import read_share
from quickstep.config import EngineConfig
from quickstep.engine.assembly import (
    LoadProgress,
    describe,
    load_weights,
    plan_for,
    set_threads,
    wire_engine,
)
from quickstep.engine.engine import Engine
from quickstep.engine.loaded_model import LoadedModel
from quickstep.engine.machine import places_for
from quickstep.engine.text.tokenizer import Tokenizer
from quickstep.model.checkpoint.fingerprint import fingerprint_with_kv
from quickstep.model.checkpoint.random_weights import RandomValues, random_model
from quickstep.model.decoder import Decoder
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.interface import Model
from quickstep.model.loader import resolve_device, resolve_dtype
from quickstep.model.long_context import with_context
from quickstep.model.sizing import MemoryPlan, weight_bytes
from quickstep.model.spec import parse_spec
from quickstep.model.weights import LayerWeights, MLPWeights
from quickstep.ops.dtypes import torch_dtype
from quickstep.ops.resolve import resolve_ops
from quickstep.runtime.kv_cache import allocate_kv

__all__ = ["Subject", "made_up_tokenizer", "open_checkpoint", "open_shape", "random_prompt"]


class Subject(msgspec.Struct, frozen=True):
    """An engine, not started, and its model.

    Attributes:
        kernels: The kernel set's name, `native-avx512`.
        kernel_s: Seconds computed so far; `kernel_how` says what they are the time in.
        num_threads: torch's, which the kernels follow.
        quantization: `LoadConfig.quantization`.
        kv_dtype: `CacheConfig.kv_dtype`.
    """

    engine: Engine
    spec: ModelSpec
    model: Model
    kernels: str
    kernel_s: Callable[[], float]
    kernel_how: str
    num_threads: int
    quantization: str | None = None
    kv_dtype: str = "auto"

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return torch_dtype(self.model.kv_shape.dtype)

    @property
    def product_dtype(self) -> torch.dtype:
        """Of the products that the layers spend their time in: int8 for quantised weights."""
        return self.dtype if self.quantization is None else torch.int8

    def weight_bytes_read(self, batch: int) -> float:
        """Bytes of packed weights that a decode step of `batch` rows reads, each once."""
        if not isinstance(self.model, Decoder):
            return weight_bytes(self.spec, self.dtype.itemsize, self.quantization)
        weights = self.model.weights
        layers = sum(
            _bytes_read(layer, read_share(self.spec, kind, batch))
            for layer, kind in zip(weights.layers, self.spec.layers, strict=True)
        )
        return layers + weights.lm_head.nbytes


def open_checkpoint(config: EngineConfig, progress: LoadProgress | None = None) -> Subject:
    """The subject that `config` names. Raises ConfigError."""
    started_s = time.monotonic()
    set_threads(config.load.num_threads)
    loaded = load_weights(config, progress)
    description = describe(loaded, time.monotonic() - started_s)
    return _wired(config, loaded.spec, loaded.model, loaded.plan, description)


def open_shape(
    config: EngineConfig,
    name: str,
    shape: Mapping[str, object],
    seed: int,
    progress: LoadProgress | None = None,
) -> Subject:
    """Random weights of a shape (a `config.json`'s content). Raises ConfigError."""
    started_s = time.monotonic()
    set_threads(config.load.num_threads)
    spec = with_context(parse_spec(shape), config.max_model_len, config.allow_long_context)
    device = resolve_device(config.load.device)
    dtype = resolve_dtype(config.load.dtype, spec)
    isa = os.environ.get("QUICKSTEP_CPU_ISA")
    places = places_for(config.load.pin_threads)
    ops = resolve_ops(device, "auto", config.load.num_threads, isa, places)
    plan = plan_for(config, spec, dtype, device, ops)
    draw = RandomValues(dtype, device, seed, config.load.quantization)
    model = random_model(spec, ops, draw, plan.max_model_len, progress)
    description = LoadedModel(
        name=name,
        fingerprint=fingerprint_with_kv(model, model.kv_shape.stored_as(config.cache.kv_dtype)),
        max_model_len=plan.max_model_len,
        vocab_size=spec.vocab_size,
        tokenizer=made_up_tokenizer(spec.vocab_size),
        load_s=time.monotonic() - started_s,
        memory_plan=plan,
    )
    return _wired(config, spec, model, plan, description)


def made_up_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level vocabulary in which token i reads as i in hexadecimal, after a space."""
    vocabulary = {f"Ġ{token_id:x}": token_id for token_id in range(vocab_size)}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    library.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(library)


def random_prompt(rng: random.Random, vocab_size: int, num_tokens: int) -> list[int]:
    """Random token ids: no two prompts share a block."""
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


def _wired(
    config: EngineConfig,
    spec: ModelSpec,
    model: Model,
    plan: MemoryPlan,
    description: LoadedModel,
) -> Subject:
    kv_shape = model.kv_shape.stored_as(config.cache.kv_dtype)
    kv = allocate_kv(kv_shape, plan.num_blocks, config.cache.block_size, model.device)
    timed, kernel_s, kernel_how = with_kernel_clock(model, time.perf_counter)
    return Subject(
        engine=wire_engine(config, timed, kv, plan, description),
        spec=spec,
        model=model,
        kernels=model.ops.name if isinstance(model, Decoder) else "transformers",
        kernel_s=kernel_s,
        kernel_how=kernel_how,
        num_threads=torch.get_num_threads(),
        quantization=config.load.quantization,
        kv_dtype=config.cache.kv_dtype,
    )


def _bytes_read(layer: LayerWeights, expert_share: float) -> float:
    attention = layer.attention.qkv.nbytes + layer.attention.o_proj.nbytes
    mlp = layer.mlp
    if isinstance(mlp, MLPWeights):
        return attention + mlp.gate_up.nbytes + mlp.down_proj.nbytes
    experts = sum(one.gate_up.nbytes + one.down_proj.nbytes for one in mlp.experts)
    return attention + mlp.router.nbytes + expert_share * experts
