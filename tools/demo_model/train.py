"""Train the demo model: `python -m tools.demo_model.train --run FOLDER --finish-by HH:MM`.

Owns the training loop, the optimisers and the checkpoints. FOLDER holds what `dataset` built; a
run that was stopped resumes from FOLDER/checkpoint.pt. With a deadline the schedule follows the
clock: however slow the machine, the decay ends on time.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import torch
from torch import Tensor, nn

from tools.demo_model import schedule
from tools.demo_model.dataset import SEED, RowSampler, load_arrays
from tools.demo_model.network import Llama, Shape

TOKENS_PER_STEP = 4_096
_MATRIX_RATE = 3e-3  # Muon, its update scaled to the RMS of AdamW's
_EMBEDDING_RATE = 3e-3
_WEIGHT_DECAY = 0.1
_MAX_GRADIENT_NORM = 1.0
_SECONDS_PER_CHECKPOINT = 150.0
_STEPS_PER_LOG = 50
_MAX_STEP_SECONDS_COUNTED = 60.0  # a longer step is a suspended machine, not training


@dataclass(slots=True)
class Account:
    """What a run has used so far; owned by `Trainer`, stored in its checkpoints."""

    step: int = 0
    tokens: int = 0
    train_seconds: float = 0.0
    started: float = 0.0  # seconds since the epoch, when the run was first started


@dataclass(frozen=True, slots=True)
class Goal:
    """When training ends; exactly one of the two is given."""

    finish_at: float | None  # seconds since the epoch
    tokens: int | None

    def progress(self, account: Account, now: float) -> float:
        """How much of the run is done, in [0, 1]."""
        if self.finish_at is None:
            return account.tokens / (self.tokens or 1)
        return min(1.0, (now - account.started) / (self.finish_at - account.started))


class Trainer:
    """Owns the model, the optimisers and the account of one run."""

    def __init__(self, run: Path, sampler: RowSampler, goal: Goal) -> None:
        torch.manual_seed(SEED)
        self._run = run
        self._sampler = sampler
        self._goal = goal
        self._model = Llama(Shape())
        self._optimizers = _optimizers(self._model)
        self._account = Account()

    def run(self) -> None:
        """Train to the goal, resuming from a checkpoint if there is one."""
        self._resume()
        account, saved = self._account, time.monotonic()
        account.started = account.started or time.time()
        while (progress := self._goal.progress(account, time.time())) < 1.0:
            began = time.monotonic()
            loss = self._step_(progress)
            account.train_seconds += min(time.monotonic() - began, _MAX_STEP_SECONDS_COUNTED)
            if account.step % _STEPS_PER_LOG == 0:
                self._log(progress, loss)
            if time.monotonic() - saved > _SECONDS_PER_CHECKPOINT:
                self._save()
                saved = time.monotonic()
        self._save()

    def _step_(self, progress: float) -> float:
        account = self._account
        context = schedule.context_len(account.step)
        num_rows = TOKENS_PER_STEP // context
        share = schedule.chat_share(progress)
        rows, weights = map(
            torch.from_numpy, self._sampler.rows(account.step, num_rows, context, share)
        )
        with torch.autocast("cpu", torch.bfloat16):
            loss = self._model.loss(rows[:, :-1], rows[:, 1:], weights[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), _MAX_GRADIENT_NORM)
        scale = schedule.learning_rate_scale(progress)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        account.step += 1
        account.tokens += num_rows * context
        return loss.item()

    def _log(self, progress: float, loss: float) -> None:
        account = self._account
        entry = asdict(account) | {
            "progress": round(progress, 4),
            "loss": round(loss, 4),
            "tokens_per_s": round(account.tokens / account.train_seconds),
        }
        with (self._run / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")

    def _save(self) -> None:
        partial = self._run / "checkpoint.partial"
        state = {
            "model": self._model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "account": asdict(self._account),
        }
        torch.save(state, partial)
        partial.replace(self._run / "checkpoint.pt")

    def _resume(self) -> None:
        path = self._run / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        self._model.load_state_dict(state["model"])
        for optimizer, stored in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)
        self._account = Account(**state["account"])


def _optimizers(model: Llama) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices: list[Tensor] = [p for p in model.model.layers.parameters() if p.ndim == 2]
    norms: list[Tensor] = [p for p in model.parameters() if p.ndim == 1]
    muon = torch.optim.Muon(
        matrices, lr=_MATRIX_RATE, weight_decay=_WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
    )
    groups = [
        {"params": [model.model.embed_tokens.weight], "weight_decay": _WEIGHT_DECAY},
        {"params": norms, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=_EMBEDDING_RATE, betas=(0.9, 0.95), fused=True)
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
    return [muon, adamw]


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder that `dataset` filled")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument("--finish-by", metavar="HH:MM", help="end the decay at this clock time")
    goal.add_argument("--tokens", type=int, help="end the decay after this many tokens")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    finish_at = None
    if arguments.finish_by:
        finish_at = schedule.deadline(arguments.finish_by, datetime.now()).timestamp()
    sampler = RowSampler(load_arrays(arguments.run))
    Trainer(arguments.run, sampler, Goal(finish_at, arguments.tokens)).run()


if __name__ == "__main__":
    main()
