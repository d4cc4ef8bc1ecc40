"""Tiny checkpoints with a prediction layer (`model.mtp`), and what transformers computes of it.

transformers has no prediction layers. One is a model of its own family with one layer, whose
inputs are `fc` of the normed embeddings and hidden states.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import transformers
from golden_cases import CASES, Case
from safetensors.torch import load_file, save_file
from torch import Tensor

from quickstep.engine.assembly import load_weights
from quickstep.engine.llm import engine_config
from quickstep.engine.speculation import open_model_proposers
from quickstep.model.sizing import MemoryPlan
from quickstep.ops.tensors import FLOAT32, HostTensor
from quickstep.runtime.speculation.eagle import EagleProposer
from quickstep.runtime.speculation.proposer import ComputedRow, ComputedStep, DraftTask
from quickstep.types import Admission, SamplingParams

PLAN = MemoryPlan(32, 128, 4, 256, (), ())
QWEN, QWEN_MOE, QWEN_NEXT, GLM, DEEPSEEK, NEMOTRON = (
    next(case for case in CASES if case.name == name)
    for name in (
        *("qwen3.5", "qwen3.5-moe", "qwen3-next", "glm4-moe", "deepseek-v3"),
        "nemotron-h-latents",
    )
)
MIMO = Case("mimo", "Qwen2")  # the same layers under another name
ALL = (QWEN, QWEN_MOE, QWEN_NEXT, GLM, DEEPSEEK, NEMOTRON, MIMO)
_COUNT = "num_nextn_predict_layers"
_QWEN_NAMES = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0.")
_NEXTN_NAMES = ("eh_proj", "enorm", "hnorm", "shared_head.norm", "")
_MIMO_NAMES = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", "")
_NEMOTRON_NAMES = (
    *("layers.0.eh_proj", "layers.0.enorm", "layers.0.hnorm", "layers.1.final_layernorm"),
    "layers.",
)


@dataclass(frozen=True)
class PredictionLayer:
    """A target and its layer, both of transformers, and the layer's other tensors.

    `offset` is added to the weights of norms; `feeds_normed` and `hidden_first` as in `model.mtp`.
    """

    target: transformers.PreTrainedModel
    layer: transformers.PreTrainedModel
    fc: Tensor
    embedding_norm: Tensor
    hidden_norm: Tensor
    offset: float
    feeds_normed: bool
    hidden_first: bool

    def drafts(self, token_ids: Sequence[int], hidden: Tensor, count: int) -> list[int]:
        """The best draft, and those after it: after all tokens, of which `hidden` [T - 1, C] are
        the final hidden states but for the newest. All positions again for every draft.
        """
        config = self.target.config
        eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        tokens, features = list(token_ids[1:]), hidden
        norm = getattr(self.layer.model, "norm_f", None) or self.layer.model.norm
        size = hidden.shape[1]
        found: list[int] = []
        with torch.no_grad():
            embedding = self.target.get_input_embeddings()
            for _ in range(count):
                embedded = embedding(torch.tensor(tokens))
                parts = (
                    torch.nn.functional.rms_norm(x, (size,), weight + self.offset, eps)
                    for x, weight in (
                        (embedded, self.embedding_norm),
                        (features, self.hidden_norm),
                    )
                )
                order = -1 if self.hidden_first else 1
                inputs = torch.cat(list(parts)[::order], -1) @ self.fc.T
                before_norm: list[Tensor] = []
                hook = norm.register_forward_pre_hook(
                    lambda _, args, kept=before_norm: kept.append(args[0])
                )
                output = self.layer.model(inputs_embeds=inputs[None]).last_hidden_state[0, -1]
                hook.remove()
                found.append(int(self.target.lm_head(output).argmax()))
                tokens.append(found[-1])
                following = output if self.feeds_normed else before_norm[0][0, -1]
                features = torch.cat((features, following[None]))
        return found

    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        """The target's final hidden states [T, C]."""
        with torch.no_grad():
            return self.target.model(torch.tensor([token_ids])).last_hidden_state[0]


def write_with_layer(path: Path, case: Case) -> PredictionLayer:
    """Write the checkpoint of a case with a random layer, as released files name it."""
    target = case.save(path)
    num_layers = target.config.num_hidden_layers
    is_qwen, is_mimo = case.family.startswith("Qwen3"), case.name == "mimo"
    is_nemotron = case.family == "NemotronH"
    one: dict[str, object] = {"num_hidden_layers": 1}
    if is_nemotron:
        one = {"layers_block_type": ["full_attention", "moe"]}
    elif is_qwen:
        one |= {"layer_types": ["full_attention"], "mlp_only_layers": []}
    elif not is_mimo:
        one |= {"first_k_dense_replace": 0}
    other = path / "layer"
    layer = replace(case, values=case.values | one).save(other, seed=1)
    generator = torch.Generator().manual_seed(3)
    size = target.config.hidden_size
    fc = torch.randn(size, 2 * size, generator=generator) * 0.15
    norms = [torch.randn(size, generator=generator) * 0.3 + (not is_qwen) for _ in range(2)]
    start, names = f"model.layers.{num_layers}.", _NEXTN_NAMES
    if is_qwen:
        start, names = "mtp.", _QWEN_NAMES
    elif is_nemotron:
        start, names = "mtp.", _NEMOTRON_NAMES
    elif is_mimo:
        start, names = "model.mtp_layers.0.", _MIMO_NAMES
    tensors = {
        f"{start}{name}.weight": tensor for name, tensor in zip(names, (fc, *norms), strict=False)
    }
    layers = "backbone.layers." if is_nemotron else "model.layers.0."
    for name, tensor in load_file(other / "model.safetensors").items():
        if name in ("model.norm.weight", "backbone.norm_f.weight"):
            tensors[f"{start}{names[3]}.weight"] = tensor
        elif name.startswith(layers):
            tensors[f"{start}{names[4]}{name.removeprefix(layers)}"] = tensor
    change_tensors(path, tensors)
    count = "mtp_num_hidden_layers" if case.family.startswith("Qwen3_5") else _COUNT
    change_config(path, {count: 1})
    if is_mimo:
        change_config(path, {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"})
    return PredictionLayer(
        target,
        layer,
        fc,
        *norms,
        float(is_qwen),
        is_qwen or is_nemotron or is_mimo,
        hidden_first=is_mimo,
    )


def change_tensors(path: Path, changes: Mapping[str, Tensor | None]) -> None:
    """Add tensors to a checkpoint, replace some, or remove them (None)."""
    file = path / "model.safetensors"
    tensors = {**load_file(file), **changes}
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, file, {"format": "pt"})


def change_config(path: Path, changes: dict[str, object]) -> None:
    """Add keys to its config, or replace them."""
    file = path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(config | changes), encoding="utf-8")


def drafted(
    path: Path, token_ids: tuple[int, ...], hidden: Tensor, chunks: tuple[int, ...] = (11,)
) -> list[int]:
    """Six drafts of a checkpoint's layer after 12 tokens, of which the final hidden states come in
    steps of these sizes.
    """
    speculation = {"method": "mtp", "num_speculative_tokens": 8, "tree_width": 1}
    options = {"speculative_config": speculation, "block_size": 4, "num_threads": 1}
    config = engine_config(str(path), options)
    model = load_weights(config, None).model
    [proposer] = open_model_proposers(config, model, PLAN, path)
    assert isinstance(proposer, EagleProposer)
    greedy = SamplingParams(temperature=0.0)
    proposer.admit(0, Admission(0, "r#0", token_ids[:-1], 11, greedy, 3))
    blocks = np.array([2, 5, 3], dtype=np.int32)
    start = 0
    for count in chunks:
        of_step = HostTensor(hidden[start : start + count].numpy(), FLOAT32)
        proposer.compute(ComputedStep((ComputedRow(0, start, count, blocks),), of_step, ()))
        start += count
    [drafts] = proposer.propose([DraftTask(0, 6, token_ids[-1:])])
    assert isinstance(drafts, tuple)
    return list(drafts)
