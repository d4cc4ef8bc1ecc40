"""The same steps op by op and recorded, for the tests of CUDA graphs on a GPU and without one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from op_checks.invariance import same_bits
from quickstep.model.adapters.lora_modules import lora_modules
from quickstep.model.decoder import Decoder
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.spec import parse_spec
from quickstep.ops.table import KVCache, LoRAAdapter, LoRAPart, OpTable
from quickstep.ops.tensors import to_torch
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.slots import Slot
from quickstep.runtime.steps.graphs import GraphSteps
from quickstep.runtime.steps.opening import open_steps
from quickstep.runtime.steps.step_model import GraphBackend, GraphOptions
from quickstep.types import Admission, Phase, SamplingParams, StepRow

# Interpreted, a layer takes seconds.
_SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
SMALL = parse_spec(
    {
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        **_SIZES,
    }
)

MIXTURE = parse_spec(
    {
        "architectures": ["MixtralForCausalLM"],
        **_SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }
)

BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS = 4, 24, 3
VOCAB = SMALL.vocab_size


def make_adapter(
    ops: OpTable, rank: int, seed: int, device: str = "cpu", spec: ModelSpec = SMALL
) -> LoRAAdapter:
    generator = torch.Generator(device).manual_seed(seed)
    found = lora_modules(spec).values()
    modules: list[list[LoRAPart]] = [[] for _ in range(1 + max(one.number for one in found))]
    for one in found:
        a = torch.randn(rank, one.num_inputs, generator=generator, device=device)
        b = torch.randn(one.num_outputs, rank, generator=generator, device=device)
        shaped = a.T.contiguous() if one.is_embedding else a
        part = LoRAPart(shaped, b, one.first_output, 0.1, one.is_embedding)
        modules[one.number].append(part)
    return ops.pack_lora(modules)


def kv_with_history(model: Decoder, kv_dtype: str = "auto") -> KVCache:
    """The blocks of the pool hold values of earlier steps; one more is the scratch block."""
    shape = model.kv_layout.stored_as(kv_dtype)
    kv = allocate_kv(shape, NUM_BLOCKS + 1, BLOCK_SIZE, model.device)
    generator = torch.Generator(model.device.type).manual_seed(5)
    for cache in kv.tensors:
        tensor = to_torch(cache)
        if tensor.dtype == torch.int8:
            tensor.random_(-5, 5, generator=generator)
            tensor[..., -4:].view(torch.float32).fill_(0.01)
        else:
            tensor.normal_(generator=generator)
    return kv


class BothSteps:
    """The same rows op by op and recorded, each over a cache of its own."""

    def __init__(
        self,
        model: Decoder,
        backend: GraphBackend,
        adapters: dict[str, LoRAAdapter] | None = None,
        max_width: int = 1,
        kv_dtype: str = "auto",
        max_prompt_tokens: int = 0,
    ) -> None:
        options = GraphOptions(backend, NUM_SLOTS, max_width, max_prompt_tokens)
        self.caches = [kv_with_history(model, kv_dtype) for _ in range(2)]
        self.eager = open_steps(model, self.caches[0], BLOCK_SIZE, True, adapters)
        recorded = open_steps(model, self.caches[1], BLOCK_SIZE, False, adapters, graphs=options)
        assert isinstance(recorded, GraphSteps)
        self.recorded = recorded

    def capture_all(self) -> None:
        while self.recorded.capture_next():
            pass

    def capture_for(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> None:
        """Capture what a step with these rows needs, which is next."""
        self.recorded.prepare(rows, slots)
        assert self.recorded.capture_next()

    def check(
        self, rows: Sequence[StepRow], slots: Sequence[Slot], every_token: bool = False
    ) -> None:
        """Equal hidden states, logits and caches."""
        emitting = [
            (index, num_after)
            for index, row in enumerate(rows)
            for num_after in range(row.num_drafts, -1, -1)
            if row.emits
        ]
        results = []
        for steps in (self.eager, self.recorded):
            steps.prepare(rows, slots)
            hidden, logits = steps.run(emitting, every_token)
            results.append((to_torch(hidden).clone(), to_torch(logits).clone()))
        for mine, theirs in zip(*results, strict=True):
            assert same_bits(mine, theirs)
        mine, theirs = (kv.tensors for kv in self.caches)
        for one, other in zip(mine, theirs, strict=True):
            assert same_bits(to_torch(one)[:NUM_BLOCKS], to_torch(other)[:NUM_BLOCKS])


def make_slot(index: int, block_ids: Sequence[int]) -> Slot:
    slot = Slot(Admission(index, f"r#{index}", (1,), 1, SamplingParams(), 0), VOCAB)
    slot.append_blocks(block_ids)
    return slot


def prompt_row(index: int, start: int, token_ids: tuple[int, ...], emits: bool = True) -> StepRow:
    return StepRow(index, start, len(token_ids), token_ids, (), Phase.PREFILL, emits, 0)


def decode_row(index: int, start: int, token_ids: tuple[int, ...], adapter: str = "") -> StepRow:
    drafts = len(token_ids) - 1
    return StepRow(
        index, start, len(token_ids), token_ids, (), Phase.DECODE, True, 0, drafts, adapter=adapter
    )


FIRST = [make_slot(0, (3, 9, 1)), make_slot(1, (7,)), make_slot(2, (2, 20, 11, 4, 8))]
ROWS = [decode_row(0, 9, (17,)), decode_row(1, 2, (5,)), decode_row(2, 18, (30,))]
# prompts next to a decode row: one is complete, another has more tokens
PROMPT_ROWS = [
    ROWS[0],
    prompt_row(1, 0, (4, 5, 6)),
    prompt_row(2, 5, (7, 1, 2, 30), emits=False),
]
OTHERS = [make_slot(1, (23, 0)), make_slot(0, (10, 5, 6, 12))]
OTHER_ROWS = [decode_row(1, 4, (1,)), decode_row(0, 15, (31,))]
