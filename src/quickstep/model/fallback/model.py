"""Any other decoder through `transformers`, with our paged attention and linear layers inside.

Called by the loader for specs that are not native. Before a model is handed out it has to show on
a probe that it computes what transformers' own eager attention computes, whole and in chunks;
otherwise it is refused. `exact` says whether every matrix runs over the op table and the probe gave
the same bits whole and in chunks: parts that transformers computes in its own way (experts,
convolutions) may depend on the batch. Norms and activations run on tiles of a fixed shape. This is
a measurement; for native models exactness holds by construction.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.source import Checkpoint
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.fallback.modules import (
    ATTENTION_NAME,
    FixedRows,
    HiddenStates,
    PackedLinear,
    PagedStep,
    paged_attention_forward,
)
from quickstep.model.interface import ForwardBatch, KVShape
from quickstep.ops.table import KVCache, OpTable, PagedLayout

__all__ = ["TransformersModel", "load_fallback"]

_PROBE_LEN = 24
_PROBE_BLOCK = 16
_WHOLE = (_PROBE_LEN,)
_CHUNKS = (7, 1, 1, _PROBE_LEN - 9)
_ACTIVATION_MODULES = ("transformers.activations", "torch.nn.modules.activation")
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


class TransformersModel:
    """A transformers model behind `model.interface.Model`."""

    def __init__(
        self,
        parts: tuple[nn.Module, nn.Module],
        ops: OpTable,
        spec: ModelSpec,
        placement: tuple[torch.device, torch.dtype],
        max_model_len: int,
        fingerprint: str,
    ) -> None:
        self._body, self._head = parts
        self._ops = ops
        self._spec = spec
        self._device, self._dtype = placement
        self._kv_shape = KVShape(spec.num_layers, spec.num_kv_heads, spec.head_size, self._dtype)
        self._max_model_len = max_model_len
        self._fingerprint = fingerprint
        self._exact = False

    @property
    def spec(self) -> ModelSpec:
        """What was read from the config; layers and frequencies are transformers' business."""
        return self._spec

    @property
    def kv_shape(self) -> KVShape:
        """What to allocate."""
        return self._kv_shape

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        return self._spec.vocab_size

    @property
    def max_model_len(self) -> int:
        """Longest sequence the positions allow, in tokens."""
        return self._max_model_len

    @property
    def device(self) -> torch.device:
        """Where weights and KV live."""
        return self._device

    @property
    def fingerprint(self) -> str:
        """Stable name of weights, dtype and kernel set (hex digest)."""
        return self._fingerprint

    @property
    def exact(self) -> bool:
        """Whether the probe gave a row the same bits whatever stood beside it."""
        return self._exact

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """`Model.forward`; transformers computes every token's hidden state in any case."""
        windows: set[int | None] = set()
        output = self._body(
            input_ids=batch.token_ids.unsqueeze(0),
            position_ids=batch.layout.positions.unsqueeze(0),
            use_cache=False,
            paged_step=PagedStep(batch.layout, kv, self._ops, windows),
        )
        expected = {layer.window for layer in self._spec.layers}
        if windows != expected:
            raise ConfigError(
                f"architecture {self._spec.architecture!r} has attention windows {expected} in its "
                f"config and asks its attention for {windows}, so it cannot be paged"
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden if batch.emitting is None else hidden[batch.emitting.tokens]

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[E, hidden] -> [E, V] fp32, as the architecture's head computes them."""
        output = self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False)
        logits: Tensor = output.logits[0]
        return logits.float()

    def verify(self, probe: Tensor, expected: Tensor) -> None:
        """Compare a probe's logits [T, V] with eager attention's; find out whether it is exact.

        Raises:
            ConfigError: They differ by more than the dtype's rounding.
        """
        limit = _TOLERANCE[self._dtype] * float(expected.abs().max())
        whole, chunked = self._probe(probe, _WHOLE), self._probe(probe, _CHUNKS)
        for found, how in ((whole, "as a whole"), (chunked, "in chunks")):
            difference = float((found - expected).abs().max())
            if not difference <= limit:
                raise ConfigError(
                    f"architecture {self._spec.architecture!r} computes logits that differ by "
                    f"{difference:.3g} with paged attention ({how}), so it cannot be served"
                )
        self._exact = torch.equal(whole, chunked) and _all_packed(self._body)

    def _probe(self, probe: Tensor, chunks: tuple[int, ...]) -> Tensor:
        """Logits of the probe's tokens, computed in chunks."""
        shape, device = self._kv_shape, self._device
        num_blocks = -(-_PROBE_LEN // _PROBE_BLOCK)
        size = (num_blocks, _PROBE_BLOCK, shape.num_kv_heads, shape.head_size)
        keys, values = (
            tuple(
                torch.zeros(size, dtype=self._dtype, device=device) for _ in range(shape.num_layers)
            )
            for _ in range(2)
        )
        tables = torch.arange(num_blocks, dtype=torch.int32, device=device).unsqueeze(0)
        logits, start = [], 0
        for count in chunks:
            stop = start + count
            at = torch.arange(start, stop, device=device)
            layout = PagedLayout(at, at, (0, count), (stop,), tables, _PROBE_BLOCK)
            hidden = self.forward(ForwardBatch(probe[start:stop], layout), KVCache(keys, values))
            logits.append(self.logits(hidden))
            start = stop
        return torch.cat(logits)


def load_fallback(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    ops: OpTable,
    placement: tuple[torch.device, torch.dtype],
    max_model_len: int,
    fingerprint: str,
) -> TransformersModel:
    """Load through transformers, put our parts in, and check the result on a probe.

    Raises:
        ConfigError: The architecture cannot take our attention, or computes something else with it.
    """
    device, dtype = placement
    causal = _open(checkpoint, spec, dtype).to(device).eval()
    probe = torch.arange(_PROBE_LEN, device=device) * 7919 % spec.vocab_size
    with torch.no_grad():
        expected = causal(input_ids=probe.unsqueeze(0), use_cache=False).logits[0].float()
    transformers.AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
    causal.set_attn_implementation(ATTENTION_NAME)
    body = causal.base_model
    if body is causal:
        raise ConfigError(
            f"architecture {spec.architecture!r} does not part its body from its head"
        )
    setattr(causal, causal.base_model_prefix, HiddenStates())
    for root in (body, causal):
        _pack(root, ops)
        _tile(root)
    model = TransformersModel((body, causal), ops, spec, placement, max_model_len, fingerprint)
    model.verify(probe, expected)
    return model


def _open(checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype) -> Any:
    name = spec.architecture
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (ValueError, KeyError, OSError, ImportError, RuntimeError) as error:
        raise ConfigError(f"transformers cannot load architecture {name!r}: {error}") from None
    causal, report = loaded
    missing = sorted(report["missing_keys"]) + sorted(str(k) for k in report["mismatched_keys"])
    if missing:
        raise ConfigError(f"the checkpoint and {name} differ: tensor {missing[0]!r} is missing")
    if not type(causal)._supports_attention_backend:
        raise ConfigError(
            f"architecture {name!r} does not let its attention be replaced in transformers "
            f"{transformers.__version__}, so it cannot be paged"
        )
    return causal


def _pack(root: nn.Module, ops: OpTable) -> None:
    """Replace every linear layer below `root` by one over the op table, freeing as it goes."""
    for module in list(root.modules()):
        for name, child in list(module.named_children()):
            if type(child) not in (nn.Linear, Conv1D):
                continue
            parameters = dict(child.named_parameters(recurse=False))
            weight = parameters["weight"].detach()
            weight = weight.t().contiguous() if type(child) is Conv1D else weight
            bias = parameters["bias"].detach() if "bias" in parameters else None
            setattr(module, name, PackedLinear(ops.pack_linear(weight, bias), ops.linear))


def _all_packed(root: nn.Module) -> bool:
    """No matrix is left (fused experts, convolutions) that torch multiplies in its own way."""
    matrices = {id(p) for p in root.parameters() if p.dim() > 1}
    looked_up = {id(m.weight) for m in root.modules() if isinstance(m, nn.Embedding)}
    return matrices <= looked_up


def _tile(root: nn.Module) -> None:
    """Run every norm and activation below `root` on tiles of a fixed shape."""
    for module in list(root.modules()):
        for name, child in list(module.named_children()):
            kind = type(child)
            norm = kind.__name__.endswith(("RMSNorm", "LayerNorm", "Norm1P"))
            if norm or kind.__module__ in _ACTIVATION_MODULES:
                setattr(module, name, FixedRows(child))
