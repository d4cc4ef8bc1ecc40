"""Medusa heads: each predicts one more token from the hidden state of the last one.

Head i is one or more blocks x + silu(linear(x)) and an output projection, over the hidden state
from which the target sampled its newest token; it predicts token i + 1 after that one (Medusa,
arXiv:2401.10774). The drafts are the chain of the heads' samples, with the noise of the target, or
the likeliest tree of their candidates; nothing has to be kept between steps.

Reads the two published layouts: that of the paper's repository (`0.0.linear.weight`, `0.1.weight`)
and that of vLLM (`blocks.0.layers.0.weight`, `lm_heads.0.weight`), in safetensors. Heads without a
projection use the target's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.source import reading_checkpoint
from quickstep.model.checkpoint.tensor_reader import TensorReader
from quickstep.model.checkpoint.weights import open_checkpoint_files
from quickstep.model.decoder import Decoder
from quickstep.ops.table import OpTable
from quickstep.ops.tensors import (
    FLOAT32,
    AnyTensor,
    HostTensor,
    as_float64,
    to_numpy,
)
from quickstep.ops.weights import LinearWeight
from quickstep.runtime.sampling.native_sampler import open_sampler
from quickstep.runtime.sampling.state import SamplingState
from quickstep.runtime.speculation.proposer import Drafts, DraftTask
from quickstep.runtime.speculation.trees import (
    Candidate,
    candidates_of,
    likeliest_tree,
    tree_admission,
)
from quickstep.types import Admission

# Names of tensors in the two layouts, with the numbers of the head and of the block.
_BLOCK = re.compile(
    r"(\d+)\.(\d+)\.linear\.(weight|bias)|blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"
)
_PROJECTION = re.compile(r"(\d+)\.\d+\.weight|lm_heads\.(\d+)\.weight")
_PREFIX = re.compile(r"medusa_heads?\.")


class MedusaHead(msgspec.Struct, frozen=True):
    """One head: its blocks, hidden -> hidden, and its projection, hidden -> V."""

    blocks: tuple[LinearWeight, ...]
    lm_head: LinearWeight


class MedusaProposer:
    """Proposes up to `tree_width` tokens of each head. `heads` are packed for the op table of
    `target`.
    """

    name = "medusa"
    needs_hidden = True

    def __init__(self, target: Decoder, heads: Sequence[MedusaHead], tree_width: int = 1) -> None:
        self._ops = target.ops
        self._heads = tuple(heads)
        self._tree_width = tree_width
        self._vocab_size = target.vocab_size
        self._sample = open_sampler(target)
        self._slots: dict[int, _MedusaSlot] = {}

    def admit(self, slot: int, admission: Admission) -> None:
        """`Proposer.admit`."""
        self._slots[slot] = _MedusaSlot(admission, self._vocab_size, self._tree_width)

    def observe(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """`Proposer.observe`."""
        self._slots[slot].num_outputs += len(token_ids)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Drafts]:
        """`Proposer.propose`."""
        levels: list[list[list[Candidate]]] = [[] for _ in tasks]
        for task in tasks:
            self.observe(task.slot, task.new_token_ids)
        active = [index for index, task in enumerate(tasks) if task.hidden is not None]
        for depth, head in enumerate(self._heads):
            active = [
                index for index in active if len(levels[index]) == depth < tasks[index].num_drafts
            ]
            if not active:
                break
            states = []
            for index in active:
                slot = self._slots[tasks[index].slot]
                slot.state.num_outputs = slot.num_outputs + depth
                states.append(slot.state)
            logits = _logits(self._ops, head, _rows([tasks[index].hidden for index in active]))
            samples = self._sample(logits, states, None)
            for index, sampled, state in zip(active, samples, states, strict=True):
                candidates = candidates_of(sampled, state, self._tree_width)
                if candidates:
                    levels[index].append(candidates)
        return [
            likeliest_tree(of_task, task.num_drafts)
            for of_task, task in zip(levels, tasks, strict=True)
        ]

    def release(self, slot: int) -> None:
        """`Proposer.release`."""
        self._slots.pop(slot, None)


class _MedusaSlot:
    """The sampling of a sequence's drafts, and how many output tokens it has."""

    def __init__(self, admission: Admission, vocab_size: int, tree_width: int) -> None:
        self.state = SamplingState(tree_admission(admission, tree_width), vocab_size)
        self.num_outputs = len(admission.token_ids) - admission.prompt_len


def _rows(states: Sequence[AnyTensor | None]) -> AnyTensor:
    """Hidden states [C] as one tensor [R, C] of the same class."""
    hosts = [state for state in states if isinstance(state, HostTensor)]
    if len(hosts) == len(states):
        return HostTensor(np.stack([host.numpy() for host in hosts]), hosts[0].dtype)
    import torch

    return torch.stack([state for state in states if isinstance(state, torch.Tensor)])


def _logits(ops: OpTable, head: MedusaHead, hidden: AnyTensor) -> AnyTensor:
    """[R, C] -> [R, V] fp32."""
    for block in head.blocks:
        product = to_numpy(ops.logits(hidden, block, 1.0, None, None))
        hidden = _add(hidden, product / (1.0 + np.exp(-product)))
    return ops.logits(hidden, head.lm_head, 1.0, None, None)


def _add(hidden: AnyTensor, delta: npt.NDArray[np.floating]) -> AnyTensor:
    """The sum in the dtype and class of `hidden`."""
    total = HostTensor((as_float64(hidden) + delta).astype(np.float32), FLOAT32)
    if isinstance(hidden, HostTensor):
        return total.to(hidden.dtype)
    return total.to_torch().to(hidden.device, hidden.dtype)


def num_medusa_heads(names: Iterable[str]) -> int:
    """The heads of a checkpoint with tensors of these names."""
    found = [_BLOCK.fullmatch(_PREFIX.sub("", name, count=1)) for name in names]
    return len({match[1] or match[4] for match in found if match is not None})


def load_medusa(path: Path, target: Decoder) -> tuple[MedusaHead, ...]:
    """Read and pack the heads of a checkpoint directory for a target.

    Raises:
        ConfigError: A file is missing or broken, or the heads do not fit the target.
    """
    with reading_checkpoint(path):
        return _load_medusa(path, target)


def _load_medusa(path: Path, target: Decoder) -> tuple[MedusaHead, ...]:
    files = open_checkpoint_files(path)
    named = {_PREFIX.sub("", name, count=1): name for name in files.tensors}
    num_bytes = sum(tensor.nbytes for tensor in files.tensors.values())
    norm = target.weights.final_norm
    reader = TensorReader(files, norm.dtype, norm.device, num_bytes, None)
    hidden_size, vocab_size = target.spec.hidden_size, target.vocab_size

    def read(name: str, shape: tuple[int, ...]) -> AnyTensor:
        found = files.tensors[named[name]].shape
        if tuple(found) != shape:
            raise ConfigError(
                f"the Medusa tensor {named[name]} has the shape {list(found)}, "
                f"the model needs {list(shape)}"
            )
        return reader.tensor(named[name])

    blocks: dict[int, dict[int, str]] = {}
    projections: dict[int, str] = {}
    for name in named:
        if match := _BLOCK.fullmatch(name):
            old, new = match.groups()[:2], match.groups()[3:5]
            head, block = old if old[0] is not None else new
            blocks.setdefault(int(head), {})[int(block)] = name.rsplit(".", 1)[0]
        elif match := _PROJECTION.fullmatch(name):
            projections[int(match[1] or match[2])] = name
    if not blocks or sorted(blocks) != list(range(len(blocks))):
        raise ConfigError(f"{path} has no Medusa heads: their tensors are named 0.0.linear.weight")
    shared = "lm_head.weight" if "lm_head.weight" in named else projections.get(0)
    packed_projections: dict[str, LinearWeight] = {}
    heads = []
    for head in range(len(blocks)):
        packed = []
        for _, start in sorted(blocks[head].items()):
            bias = f"{start}.bias"
            packed.append(
                target.ops.pack_linear(
                    read(f"{start}.weight", (hidden_size, hidden_size)),
                    read(bias, (hidden_size,)) if bias in named else None,
                )
            )
        projection = projections.get(head) or shared
        if projection is None:
            lm_head = target.weights.lm_head
            assert lm_head is not None, "the target is complete but for its layers"
            heads.append(MedusaHead(tuple(packed), lm_head))
            continue
        if projection not in packed_projections:
            weight = read(projection, (vocab_size, hidden_size))
            packed_projections[projection] = target.ops.pack_linear(weight, None)
        heads.append(MedusaHead(tuple(packed), packed_projections[projection]))
    return tuple(heads)
