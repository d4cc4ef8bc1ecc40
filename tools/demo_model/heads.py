"""Train heads for the demo model: `python -m tools.demo_model.heads --run RUN --to FOLDER`.

Trains Medusa heads (arXiv:2401.10774) and an EAGLE layer (arXiv:2401.15077) on the hidden states
of the bundled model, both to predict the target's distribution of each token. `--run` holds what
`dataset` built with the bundled model's tokenizer.json in it. The results, `FOLDER/demo-medusa` and
`FOLDER/demo-eagle`, are in the published layouts; both use the target's embedding and projection.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from tools.demo_model.dataset import SEED, RowSampler, load_arrays
from tools.demo_model.export import load_exported
from tools.demo_model.network import EagleLayer, Llama, Shape
from tools.demo_model.schedule import learning_rate_scale
from tools.demo_model.update import update_

NUM_MEDUSA_HEADS = 3
_CONTEXT = 256
_ROWS_PER_STEP = 8
_CHAT_SHARE = 0.5
_LEARNING_RATE = 2e-3
_REGRESSION_WEIGHT = 0.2  # of the distance between the layer's outputs and the hidden states
_OWN_FEATURES = 0.4  # of the inputs in the second pass: outputs of the first, as when drafting
_POSITION_STRIDE = (
    4  # the losses compare every fourth position: the projection is the largest matrix
)
_STEPS_PER_LOG = 25


class MedusaHeads(nn.Module):
    """Blocks x + silu(linear(x)), one per head; the projection is the target's."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_heads))
        for linear in self.linears:
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)


class HeadTrainer:
    """Owns the heads, the layer and their optimizer."""

    def __init__(self, target: Llama) -> None:
        torch.manual_seed(SEED)
        shape = target.shape
        self._target = target
        self.medusa = MedusaHeads(shape.hidden_size, NUM_MEDUSA_HEADS)
        self.eagle = EagleLayer(shape)
        parameters = [*self.medusa.parameters(), *self.eagle.parameters()]
        self._optimizer = torch.optim.AdamW(
            parameters, lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01
        )

    def step(self, tokens: Tensor, progress: float) -> dict[str, float]:
        """One step on tokens [R, T + 1]; how often each head's best token is the target's."""
        projection = self._target.model.embed_tokens.weight.detach()
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                hidden = self._target(tokens[:, :-1])
                embedded = F.embedding(tokens[:, 1:], projection)
            wanted = _Wanted(hidden, projection)
            loss_medusa, agreements = self._medusa_loss(hidden, wanted)
            loss_eagle, agreed = self._eagle_loss(hidden, embedded, wanted)
            loss = loss_medusa + loss_eagle
        loss.backward()
        parts = (self.medusa.parameters(), self.eagle.parameters())
        update_(self._optimizer, parts, _LEARNING_RATE * learning_rate_scale(progress))
        names = [f"medusa {head}" for head in range(NUM_MEDUSA_HEADS)] + ["eagle", "eagle, own"]
        return dict(zip(names, [*agreements, *agreed], strict=True))

    def _medusa_loss(self, hidden: Tensor, wanted: "_Wanted") -> tuple[Tensor, list[float]]:
        loss, agreements = torch.zeros(()), []
        for head, linear in enumerate(self.medusa.linears):
            # position i has the hidden state of token i, which predicts i + 1: this head i + 2
            places = wanted.places - (head + 1)
            is_in = places >= 0
            state = hidden[:, places[is_in]]
            one, agreement = wanted.compare(state + F.silu(linear(state)), is_in)
            loss = loss + one * 0.8**head
            agreements.append(agreement)
        return loss, agreements

    def _eagle_loss(
        self, hidden: Tensor, embedded: Tensor, wanted: "_Wanted"
    ) -> tuple[Tensor, list[float]]:
        """Two passes: on the target's hidden states, then with some of the layer's own outputs."""
        loss, agreements = torch.zeros(()), []
        # position i has the hidden state of token i and the embedding of i + 1: it predicts i + 2
        inputs, embedded = hidden[:, :-1], embedded[:, :-1]
        places = wanted.places - 1
        is_in = places >= 0
        for _ in range(2):
            outputs = self.eagle(inputs, embedded)
            one, agreement = wanted.compare(outputs[:, places[is_in]], is_in)
            distance = F.smooth_l1_loss(outputs.float(), hidden[:, 1:].float())
            loss = loss + one + _REGRESSION_WEIGHT * distance
            agreements.append(agreement)
            own = torch.cat((hidden[:, :1], outputs.detach()[:, :-1]), dim=1)
            is_own = torch.rand(own.shape[:2]) < _OWN_FEATURES
            inputs = torch.where(is_own[..., None], own, hidden[:, :-1])
        return loss, agreements


class _Wanted:
    """The target's distributions of the next token, at some positions: all would be slow."""

    def __init__(self, hidden: Tensor, projection: Tensor) -> None:
        self._projection = projection
        first = int(torch.randint(_POSITION_STRIDE, ()))
        self.places = torch.arange(first, hidden.shape[1], _POSITION_STRIDE)
        with torch.no_grad():
            logits = F.linear(hidden[:, self.places], projection)
            self._probabilities = logits.float().softmax(-1)
            self._best = logits.argmax(-1)

    def compare(self, states: Tensor, is_in: Tensor) -> tuple[Tensor, float]:
        """Of states [R, P, C] for some of the places: the mean cross entropy to the target's
        distribution, and how often the best tokens are the same.
        """
        logits = F.linear(states, self._projection).float().flatten(0, 1)
        loss = F.cross_entropy(logits, self._probabilities[:, is_in].flatten(0, 1))
        agreed = logits.argmax(-1) == self._best[:, is_in].flatten()
        return loss, agreed.float().mean().item()


def train(target: Llama, sampler: RowSampler, seconds: float, folder: Path) -> None:
    """Train until `seconds` have passed and export."""
    trainer = HeadTrainer(target)
    began, step = time.monotonic(), 0
    sums: dict[str, float] = {}
    while (progress := (time.monotonic() - began) / seconds) < 1.0:
        rows, _ = sampler.rows(step, _ROWS_PER_STEP, _CONTEXT, _CHAT_SHARE)
        for name, value in trainer.step(torch.from_numpy(rows), progress).items():
            sums[name] = sums.get(name, 0.0) + value / _STEPS_PER_LOG
        step += 1
        if step % _STEPS_PER_LOG == 0:
            agreed = ", ".join(f"{name} {value:.3f}" for name, value in sums.items())
            print(f"{progress:.2f} step {step}: {agreed}", flush=True)
            sums = {}
    export_medusa(trainer.medusa, target.shape, folder / "demo-medusa")
    export_eagle(trainer.eagle, target.shape, folder / "demo-eagle")


def export_medusa(heads: MedusaHeads, shape: Shape, folder: Path) -> None:
    """Write the heads as the paper's repository names them, without projections of their own."""
    tensors = {}
    for head, linear in enumerate(heads.linears):
        for name, value in linear.state_dict().items():
            tensors[f"{head}.0.linear.{name}"] = value
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "num_heads": len(heads.linears),
        "num_hidden_layers": 1,
    }
    _write(tensors, config, folder)


def export_eagle(layer: EagleLayer, shape: Shape, folder: Path) -> None:
    """Write the layer as the paper's repository names it, without an embedding of its own."""
    target = json.loads(Path("src/quickstep/bundled/demo/config.json").read_text())
    _write(dict(layer.state_dict()), target | {"num_hidden_layers": 1}, folder)


def _write(tensors: dict[str, Tensor], config: dict[str, object], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()}
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the writer makes it readable by its owner only
    print(f"{folder.name}: {sum(weight.numel() for weight in weights.values()):,} parameters")


def main() -> None:
    """Parse the command line, train and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder that `dataset` filled")
    parser.add_argument("--to", type=Path, required=True, help="folder of both checkpoints")
    parser.add_argument("--target", type=Path, default=Path("src/quickstep/bundled/demo"))
    parser.add_argument("--seconds", type=float, default=600.0, help="time to train")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target = load_exported(arguments.target)
    train(target, RowSampler(load_arrays(arguments.run)), arguments.seconds, arguments.to)


if __name__ == "__main__":
    main()
