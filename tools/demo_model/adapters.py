"""Train LoRA adapters of the demo model: `python -m tools.demo_model.adapters --to FOLDER`.

Three of rank 8 (arXiv:2106.09685), on the texts of `adapter_texts`. The results,
`FOLDER/demo-docstrings`, `FOLDER/demo-annotations` and `FOLDER/demo-sql`, are in PEFT's layout.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from tools.demo_model.adapter_texts import texts
from tools.demo_model.corpus import load_corpus
from tools.demo_model.dataset import SEED
from tools.demo_model.export import load_exported
from tools.demo_model.network import Llama
from tools.demo_model.schedule import learning_rate_scale
from tools.demo_model.tokenizer import END_OF_TEXT
from tools.demo_model.update import update_

_RANK, _ALPHA = 8, 16
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_CONTEXT = 192
_ROWS_PER_STEP = 8
_LEARNING_RATE = 2e-3
_STEPS_PER_LOG = 25


class LoRALinear(nn.Module):
    """A frozen layer and its low-rank change."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(_RANK, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, _RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * (_ALPHA / _RANK)


def add_adapter(model: Llama) -> dict[str, LoRALinear]:
    """Put a new adapter around the model's layers; returns its parts by the layers' names."""
    model.requires_grad_(False)
    parts = {}
    for name, module in list(model.named_modules()):
        owner, _, last = name.rpartition(".")
        if last in _TARGETS and isinstance(module, nn.Linear):
            parts[name] = LoRALinear(module)
            setattr(model.get_submodule(owner), last, parts[name])
    return parts


def train(folder: Path, documents: Sequence[str], seconds: float) -> dict[str, LoRALinear]:
    """Train an adapter of the model in `folder` until `seconds` have passed."""
    torch.manual_seed(SEED)
    model = load_exported(folder)
    parts = add_adapter(model)
    parameters = [one for part in parts.values() for one in (part.lora_a, part.lora_b)]
    optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, betas=(0.9, 0.95))
    tokens = _tokens(folder, documents)
    rng = np.random.default_rng(SEED)
    began, step = time.monotonic(), 0
    while (progress := (time.monotonic() - began) / seconds) < 1.0:
        starts = rng.integers(0, tokens.size - _CONTEXT - 1, _ROWS_PER_STEP)
        rows = torch.from_numpy(np.stack([tokens[at : at + _CONTEXT + 1] for at in starts]))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.logits(rows[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        update_(optimizer, [parameters], _LEARNING_RATE * learning_rate_scale(progress))
        step += 1
        if step % _STEPS_PER_LOG == 0:
            print(f"{progress:.2f} step {step}: {loss:.3f} nats", flush=True)
    return parts


def _tokens(folder: Path, documents: Sequence[str]) -> np.ndarray:
    """All texts in one row, in an order of their own, each closed by the end-of-text token."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    order = np.random.default_rng(SEED).permutation(len(documents))
    encoded = tokenizer.encode_batch([documents[index] for index in order])
    return np.concatenate([np.array([*one.ids, end], np.int64) for one in encoded])


def export(parts: dict[str, LoRALinear], folder: Path) -> None:
    """Write an adapter as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, part in parts.items():
        for half, weight in (("A", part.lora_a), ("B", part.lora_b)):
            key = f"base_model.model.{name}.lora_{half}.weight"
            tensors[key] = weight.detach().to(torch.bfloat16).contiguous()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "demo",
        "r": _RANK,
        "lora_alpha": _ALPHA,
        "lora_dropout": 0.0,
        "target_modules": list(_TARGETS),
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    path = folder / "adapter_model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def main() -> None:
    """Parse the command line, train and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the three adapters")
    parser.add_argument("--target", type=Path, default=Path("src/quickstep/bundled/demo"))
    parser.add_argument("--seconds", type=float, default=200.0, help="time to train each")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name, documents in texts(load_corpus(), SEED).items():
        print(f"{name}: {len(documents):,} texts", flush=True)
        parts = train(arguments.target, documents, arguments.seconds)
        export(parts, arguments.to / f"demo-{name}")


if __name__ == "__main__":
    main()
