"""Random rows of logits of the kinds that samplers get wrong: ties, equal logits, masked tokens."""

import numpy as np


def logit_rows(
    draws: np.random.Generator, kind: str, num_rows: int, vocab_size: int, scale: float
) -> np.ndarray:
    """float32 [R, V]; a kind not named here gives plain rows."""
    rows = draws.normal(scale=scale, size=(num_rows, vocab_size)).astype(np.float32)
    if kind == "ties":
        rows = np.round(rows * 2) / 2
    elif kind == "flat":
        rows[:] = 1.5
    elif kind == "masked":
        rows[draws.random(rows.shape) < 0.7] = -np.inf
        rows[:, 0] = 0.25
    return rows
