"""One update of the weights after a backward pass. Called by `draft`, `heads` and `adapters`."""

from collections.abc import Iterable, Sequence

from torch import nn
from torch.optim import Optimizer


def update_(
    optimizer: Optimizer, parts: Sequence[Iterable[nn.Parameter]], learning_rate: float
) -> None:
    """Clip the gradient of each part to the norm 1, and take one step of the optimizer."""
    for part in parts:
        nn.utils.clip_grad_norm_(part, 1.0)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
