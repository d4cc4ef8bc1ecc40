"""Any other decoder through `transformers`, with our paged attention and linear layers inside.

Called by the loader for specs that are not native. The attention function is registered with
transformers by name; it holds no state. A step's layout and cache reach it as the keyword
`paged_step`, which transformers passes through the layers.

A model is accepted only if it computes on a probe what transformers' own eager attention computes,
in one piece and in chunks. `exact` says that every matrix runs over the op table and that the probe
gave the same bits in one piece and in chunks: parts that transformers computes in its own way
(experts, convolutions) may depend on the batch. Norms and activations run on tiles of a fixed
shape. This is a measurement; for native models exactness holds by construction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.source import Checkpoint
from quickstep.model.checkpoint.weights import some_tensors
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.interface import ForwardBatch, KVLayout
from quickstep.ops.kv_pairs import sizes_of_keys
from quickstep.ops.table import AttentionParams, KVCache, LoRAMapping, OpTable, PagedLayout
from quickstep.ops.tensors import AnyTensor, to_torch
from quickstep.ops.weights import LinearWeight

_LOGGER = logging.getLogger(__name__)

ATTENTION_NAME = "quickstep_paged"
_TILE_ROWS = 16
_LANES = 64  # twice the widest vector: torch's loops take two at a time
_SPLIT_ELEMENTS = 32_768  # at::internal::GRAIN_SIZE: smaller tensors stay on one thread
# Arguments of attention in addition to q, k and v: the supported ones, and those without effect.
_HONOURED = frozenset(("paged_step", "scaling", "sliding_window", "softcap", "s_aux"))
_HARMLESS = frozenset(
    (
        "cache_position",
        "deterministic",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    )
)


class PagedStep(msgspec.Struct, frozen=True):
    """What one forward pass passes to every attention layer. `windows` collects their windows."""

    layout: PagedLayout
    kv: KVCache
    ops: OpTable
    windows: set[int | None]


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention signature: query [1, H, T, D] -> [1, T, H, D], KV written."""
    step: PagedStep | None = options.get("paged_step")
    if step is None:
        raise ConfigError(f"{type(module).__name__} does not pass options to its attention")
    refused = _refused(attention_mask, options)
    if refused is not None:
        raise ConfigError(f"{type(module).__name__} needs {refused}, which cannot be paged")
    q, k, v = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    index = module.layer_idx
    assert isinstance(index, int)
    keys, values = step.kv.keys[index], step.kv.values[index]
    sized_for = sizes_of_keys(keys)[2:]
    if k.shape[1:] != sized_for or v.shape[1:] != sized_for:
        raise ConfigError(
            f"{type(module).__name__} has keys {list(k.shape[1:])} and values "
            f"{list(v.shape[1:])}, the cache was sized for {list(sized_for)}"
        )
    scale, window = options.get("scaling"), options.get("sliding_window")
    step.windows.add(window)
    step.ops.write_kv(k, v, keys, values, step.layout.slot_mapping)
    params = AttentionParams(
        float(q.shape[-1] ** -0.5 if scale is None else scale), window, options.get("softcap")
    )
    sinks = _sinks(module, options.get("s_aux"), q.shape[1])
    out = step.ops.paged_attention(q, keys, values, step.layout, params, sinks)
    return out.unsqueeze(0), None


def _refused(attention_mask: Tensor | None, options: Mapping[str, Any]) -> str | None:
    """An argument of attention that is not supported; None if there is none."""
    if attention_mask is not None or options.get("is_causal") is False:
        return "a mask of its own"
    for name, value in options.items():
        if name in _HONOURED or name in _HARMLESS or value is None or name == "is_causal":
            continue
        # switched off: dropout 0.0 above all
        if isinstance(value, (bool, int, float)) and not value:
            continue
        return name
    return None


def _sinks(module: nn.Module, sinks: object, num_heads: int) -> Tensor | None:
    """[H] float32: a logit of each head's softmax without a value."""
    if sinks is None:
        return None
    if not isinstance(sinks, Tensor) or sinks.numel() != num_heads:
        raise ConfigError(
            f"{type(module).__name__} passes s_aux that is no number per query head, which cannot "
            "be paged"
        )
    return sinks.detach().reshape(-1).float().contiguous()


class PackedLinear(nn.Module):
    """`nn.Linear` over the op table: the same bits for every number of rows."""

    def __init__(self, weight: LinearWeight, linear: Callable[[Tensor, LinearWeight], Tensor]):
        super().__init__()
        self._weight = weight
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., N]."""
        rows = self._linear(x.reshape(-1, x.shape[-1]), self._weight)
        return rows.reshape(*x.shape[:-1], self._weight.num_outputs)


class FixedRows(nn.Module):
    """Runs a row-wise module (a norm, an activation) on tiles of one shape, the last one padded.

    What torch computes for an element can depend on the shape around it and on where threads split
    a tensor; a tile always has the same shape and is too small to be split.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C], row by row."""
        width = x.shape[-1]
        rows = x.reshape(-1, width)
        # rows of other widths would not start at the same lane of a vector
        per_tile = min(_TILE_ROWS, max(1, _SPLIT_ELEMENTS // width)) if width % _LANES == 0 else 1
        padding = -rows.shape[0] % per_tile
        padded = nn.functional.pad(rows, (0, 0, 0, padding), value=1.0)
        tiles = [self._inner(tile.contiguous()) for tile in torch.split(padded, per_tile)]
        return torch.cat(tiles)[: rows.shape[0]].reshape(x.shape)


class BodyOutput:
    """What the heads of transformers read from a body's output: the last states; None for the rest,
    which heads hand on. `TransformersModel.verify` finds a head that computes with more.
    """

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> Tensor | None:
        return None if index else self.last_hidden_state


class HiddenStates(nn.Module):
    """Replaces the body, so that the head can run on hidden states only."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> BodyOutput:
        """Hidden states [1, E, hidden] as the body's output."""
        return BodyOutput(inputs_embeds)


_PROBE_LEN = 24
_PROBE_BLOCK = 16
_ONE_PIECE = (_PROBE_LEN,)
_CHUNKS = (7, 1, 1, _PROBE_LEN - 9)
_ACTIVATION_MODULES = ("transformers.activations", "torch.nn.modules.activation")
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


class TransformersModel:
    """A transformers model as a `model.interface.Model`."""

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
        self._kv_layout = KVLayout(spec.kv_groups, self._dtype, in_pairs=ops.kv_in_pairs)
        self._max_model_len = max_model_len
        self._fingerprint = fingerprint
        self._exact = False

    @property
    def spec(self) -> ModelSpec:
        """The sizes in the config; layers and frequencies are transformers' own."""
        return self._spec

    @property
    def kv_layout(self) -> KVLayout:
        """What to allocate."""
        return self._kv_layout

    @property
    def ops(self) -> OpTable:
        """What attention and matrix products are computed with."""
        return self._ops

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
        """Whether a row of the probe had the same bits in every batch."""
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
    def logits(self, hidden: AnyTensor, lora: LoRAMapping | None = None) -> Tensor:
        """[E, hidden] -> [E, V] fp32, as the architecture's head computes them."""
        assert lora is None, "adapters need a native model"
        output = self._head(inputs_embeds=to_torch(hidden).unsqueeze(0), use_cache=False)
        logits: Tensor = output.logits[0]
        return logits.float()

    def verify(self, probe: Tensor, expected: Tensor) -> None:
        """Compare a probe's logits [T, V] with eager attention's; find out whether it is exact.

        Raises:
            ConfigError: They differ by more than the dtype's rounding.
        """
        limit = _TOLERANCE[self._dtype] * float(expected.abs().max())
        complete, chunked = self._probe(probe, _ONE_PIECE), self._probe(probe, _CHUNKS)
        for result, how in ((complete, "in one piece"), (chunked, "in chunks")):
            difference = float((result - expected).abs().max())
            if not difference <= limit:
                raise ConfigError(
                    f"architecture {self._spec.architecture!r} computes logits that differ by "
                    f"{difference:.3g} with paged attention ({how}), so it cannot be served"
                )
        self._exact = torch.equal(complete, chunked) and _all_packed(self._body)

    def _probe(self, probe: Tensor, chunks: tuple[int, ...]) -> Tensor:
        """Logits of the probe's tokens, computed in chunks."""
        device = self._device
        num_blocks = -(-_PROBE_LEN // _PROBE_BLOCK)
        keys, values = (
            tuple(
                torch.zeros((num_blocks, _PROBE_BLOCK, *heads), dtype=self._dtype, device=device)
                for heads in self._kv_layout.head_shapes
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
        ConfigError: The architecture cannot use our attention, or computes something else with it.
    """
    causal = _open(checkpoint, spec, placement[1]).to(placement[0]).eval()
    try:
        return _paged(causal, spec, ops, placement, max_model_len, fingerprint)
    except ConfigError:
        raise
    except Exception as error:  # of transformers, whose parts may need anything
        raise ConfigError(
            f"architecture {spec.architecture!r} cannot be served through transformers "
            f"{transformers.__version__}, its parts do not run one by one: "
            f"{_first_line(error)}"
        ) from error


def _paged(
    causal: Any,
    spec: ModelSpec,
    ops: OpTable,
    placement: tuple[torch.device, torch.dtype],
    max_model_len: int,
    fingerprint: str,
) -> TransformersModel:
    device = placement[0]
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
    except Exception as error:  # transformers raises whatever its parts do
        raise ConfigError(
            f"transformers cannot load architecture {name!r}: {_first_line(error)}"
        ) from error
    causal, report = loaded
    missing = sorted(report["missing_keys"]) + sorted(str(k) for k in report["mismatched_keys"])
    if missing:
        raise ConfigError(f"the checkpoint and {name} differ: tensor {missing[0]!r} is missing")
    unused = sorted(report["unexpected_keys"])
    if unused:
        _LOGGER.warning("%s not used by transformers' %s", some_tensors(unused), name)
    if not type(causal)._supports_attention_backend:
        raise ConfigError(
            f"architecture {name!r} does not let its attention be replaced in transformers "
            f"{transformers.__version__}, so it cannot be paged"
        )
    return causal


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _pack(root: nn.Module, ops: OpTable) -> None:
    """Replace every linear layer below `root` by one over the op table, one after another."""
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
