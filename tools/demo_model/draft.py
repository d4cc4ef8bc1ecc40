"""Train a draft model of the demo model: `python -m tools.demo_model.draft --run RUN --to FOLDER`.

Distils the bundled model into a Llama of about 0.5 M parameters: on the rows of the dataset, it
learns the target's distribution of each next token. `--run` holds what `dataset` built with the
bundled model's tokenizer.json in it. The result is a checkpoint for `--speculative-model`.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tools.demo_model.dataset import SEED, RowSampler, load_arrays
from tools.demo_model.export import load_exported
from tools.demo_model.network import Llama, Shape
from tools.demo_model.schedule import learning_rate_scale
from tools.demo_model.update import update_

_SHAPE = Shape(
    hidden_size=96, intermediate_size=256, num_layers=2, num_heads=3, num_kv_heads=1, head_size=32
)
_CONTEXT = 256
_ROWS_PER_STEP = 8
_CHAT_SHARE = 0.4
_LEARNING_RATE = 4e-3
_STEPS_PER_LOG = 50
_COPIED_FILES = (
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def train(target: Llama, sampler: RowSampler, seconds: float) -> Llama:
    """Distil `target` until `seconds` have passed."""
    torch.manual_seed(SEED)
    draft = Llama(_SHAPE)
    _project_embedding_(draft, target)
    optimizer = torch.optim.AdamW(
        draft.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.05
    )
    began, step = time.monotonic(), 0
    while (progress := (time.monotonic() - began) / seconds) < 1.0:
        rows, _ = sampler.rows(step, _ROWS_PER_STEP, _CONTEXT, _CHAT_SHARE)
        tokens = torch.from_numpy(rows[:, :-1])
        with torch.autocast("cpu", torch.bfloat16):
            with torch.inference_mode():
                wanted = target.logits(tokens).clone()
            logits = draft.logits(tokens)
        loss, agreement = _compare(logits, wanted)
        loss.backward()
        update_(optimizer, [draft.parameters()], _LEARNING_RATE * learning_rate_scale(progress))
        step += 1
        if step % _STEPS_PER_LOG == 0:
            print(f"{progress:.2f} step {step}: {loss:.3f} nats, {agreement:.3f} agree", flush=True)
    return draft


def _project_embedding_(draft: Llama, target: Llama) -> None:
    """Start from the principal components of the target's embedding."""
    embedding = target.model.embed_tokens.weight.detach()
    _, _, components = torch.pca_lowrank(embedding, draft.shape.hidden_size, center=False)
    projected = embedding @ components
    with torch.no_grad():
        draft.model.embed_tokens.weight.copy_(projected * (0.1 / projected.std()))


def _compare(logits: Tensor, wanted: Tensor) -> tuple[Tensor, float]:
    """The mean divergence from the target in nats, and how often the best tokens are the same."""
    logits, wanted = logits.float().flatten(0, 1), wanted.float().flatten(0, 1)
    loss = F.kl_div(
        logits.log_softmax(-1), wanted.log_softmax(-1), reduction="batchmean", log_target=True
    )
    return loss, (logits.argmax(-1) == wanted.argmax(-1)).float().mean().item()


def export(draft: Llama, target: Path, folder: Path) -> None:
    """Write the draft model's checkpoint, with the tokenizer of `target`."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = draft.shape
    config = json.loads((target / "config.json").read_text()) | {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: w.to(torch.bfloat16).contiguous() for name, w in draft.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    for name in _COPIED_FILES:
        shutil.copyfile(target / name, folder / name)


def main() -> None:
    """Parse the command line, train and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder that `dataset` filled")
    parser.add_argument("--to", type=Path, required=True, help="folder of the draft model")
    parser.add_argument("--target", type=Path, default=Path("src/quickstep/bundled/demo"))
    parser.add_argument("--seconds", type=float, default=600.0, help="time to train")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target = load_exported(arguments.target)
    draft = train(target, RowSampler(load_arrays(arguments.run)), arguments.seconds)
    print(f"{sum(p.numel() for p in draft.parameters()):,} parameters")
    export(draft, arguments.target, arguments.to)


if __name__ == "__main__":
    main()
