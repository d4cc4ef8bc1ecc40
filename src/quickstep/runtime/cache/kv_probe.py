"""How another format of keys and values changes a model's output, measured on a few tokens.

Called when an engine opens with a KV format narrower than the model's. The error of weights is
known when they are rounded (`model.quantization`), that of keys and values only while the model
runs. Separate from `kv_cache`, which is imported before weights are read: this imports what runs a
step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quickstep.model.interface import Model
from quickstep.model.sizing import StateMemory
from quickstep.ops.table import KVCache
from quickstep.ops.tensors import to_numpy
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.slots import Slot
from quickstep.runtime.steps.opening import open_steps
from quickstep.sampling_params import SamplingParams
from quickstep.types import Admission, Phase, RowState, StepRow

# Nats; perplexity grows by a factor of about exp of it. On the bundled model's text, int8 keys and
# values change 0.0002 in the mean, four-bit weights 0.03 (`quickstep bench accuracy`).
KV_BOUND = 0.1

BLOCK_SIZE = 16
_PROBE_TOKENS = 32
_STRIDE = 7919  # a prime, so that the tokens are spread over any vocabulary


def kv_change(model: Model, kv_dtype: str) -> float:
    """Kullback-Leibler divergence of the next token with this KV format from that with the model's.

    The largest over the positions of a probe, in nats; 0 where both are the same.
    """
    own, other = probed_logits(model, "auto"), probed_logits(model, kv_dtype)
    return max(0.0, *map(_divergence, own, other))


def kv_of_one_sequence(model: Model, num_tokens: int, kv_dtype: str) -> KVCache:
    """A cache for one sequence, in `CacheConfig.kv_dtype`."""
    shape = model.kv_layout.stored_as(kv_dtype)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    return allocate_kv(shape, num_blocks, BLOCK_SIZE, model.device, StateMemory(1))


def probed_logits(model: Model, kv_dtype: str) -> npt.NDArray[np.float32]:
    """[T, V] of every position of the probe. Attention reads every key and value, a token's own
    included, out of the cache.
    """
    count = _PROBE_TOKENS
    token_ids = tuple(place * _STRIDE % model.vocab_size for place in range(count))
    kv = kv_of_one_sequence(model, count, kv_dtype)
    slot = Slot(Admission(0, "probe", token_ids, count, SamplingParams(), 0), model.vocab_size)
    slot.append_blocks(range(kv.keys[0].shape[0]))
    state = RowState(-1, 0) if kv.states else None
    row = StepRow(0, 0, count, token_ids, (), Phase.PREFILL, True, 0, state=state)
    steps = open_steps(model, kv, BLOCK_SIZE, enforce_eager=False)
    steps.prepare([row], [slot])
    _, logits = steps.run([(0, num_after) for num_after in reversed(range(count))], False)
    return to_numpy(logits)


def _divergence(own: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    p, q = _log_probs(own), _log_probs(other)
    return float((np.exp(p) * (p - q)).sum())


def _log_probs(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    return wide
