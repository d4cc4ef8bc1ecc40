"""What the runtime knows of a model: its sizes, and two calls.

Called by `runtime.runner`; implemented by `model.decoder` and by the `transformers` fallback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec
from msgspec.structs import replace

from quickstep.model.decoder_spec import KVGroup, KVSize, StateSize, kv_groups
from quickstep.ops.table import KVCache, LoRAMapping, OpTable, PagedLayout, StateRows
from quickstep.ops.tensors import AnyTensor, Device, DType, find_dtype, head_width, torch_dtype

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor


class EmittingTokens(msgspec.Struct, frozen=True):
    """The tokens of a step that get logits, by themselves: E rows of one token each.

    Attributes:
        tokens: [E] int64, which of the step's tokens they are.
        layout: Their place, like the `PagedLayout` of a step.
        lora: Their adapters, by their place among the E.
    """

    tokens: Tensor
    layout: PagedLayout
    lora: LoRAMapping | None = None


class ForwardBatch(msgspec.Struct, frozen=True):
    """One step's inputs: token_ids [T] int64, their layout, and their adapters, None for none.

    With `emitting`, only the hidden states of its tokens are needed. `features` are further
    inputs of each token: [T, C] for an EAGLE layer, what the stage before leaves ([T, hidden] each)
    for a later stage of a pipeline; () for other models. `state_rows`: what the rows do with the
    states of layers; None for a model without any.
    """

    token_ids: Tensor
    layout: PagedLayout
    emitting: EmittingTokens | None = None
    lora: LoRAMapping | None = None
    features: tuple[Tensor, ...] = ()
    state_rows: StateRows | None = None


class KVLayout(msgspec.Struct, frozen=True):
    """What a model keeps of each token in the KV cache: what the mixers of its layers declare.

    `dtype` is the model's until `stored_as`. A `KVCache` has a K and a V tensor for each layer of
    the groups (no V where `KVSize` has none), in ascending order of the layers. `states` is what
    the other layers keep of a sequence. `in_pairs`: keys and values of bfloat16 are in the order of
    `ops.kv_pairs` where their sizes allow it.
    """

    groups: tuple[KVGroup, ...]
    dtype: DType | torch.dtype
    states: tuple[StateSize, ...] = ()
    in_pairs: bool = False

    @staticmethod
    def uniform(
        num_layers: int, num_kv_heads: int, head_size: int, dtype: DType | torch.dtype
    ) -> KVLayout:
        """The layout of a model whose layers all keep as much."""
        size = KVSize(num_kv_heads, head_size)
        return KVLayout(kv_groups([size] * num_layers), dtype)

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token over all layers, K and V."""
        elements = sum(
            size.num_tensors * num_heads * width
            for size, (num_heads, width) in zip(self.sizes, self.head_shapes, strict=True)
        )
        return elements * self.dtype.itemsize

    @property
    def sizes(self) -> tuple[KVSize, ...]:
        """What a token adds in each layer that keeps anything."""
        sizes = {layer: group.size for group in self.groups for layer in group.layers}
        return tuple(sizes[layer] for layer in sorted(sizes))

    @property
    def head_shapes(self) -> tuple[tuple[int, int], ...]:
        """[K, W] of a token's K, and of its V, in each layer that has any (`KVCache`)."""
        return tuple(
            (size.num_kv_heads, head_width(size.head_size, self.dtype)) for size in self.sizes
        )

    def state_bytes(self, num_records: int) -> int:
        """Bytes of a sequence's states, with so many records, over all layers."""
        return 4 * sum(size.num_elements(num_records) for size in self.states)

    def stored_as(self, kv_dtype: str) -> KVLayout:
        """The same sizes in `CacheConfig.kv_dtype`."""
        if kv_dtype == "auto":
            return self
        dtype = find_dtype(kv_dtype)
        return replace(self, dtype=dtype if isinstance(self.dtype, DType) else torch_dtype(dtype))


@runtime_checkable
class Classifier(Protocol):
    """A model with a classification head."""

    def class_logits(self, hidden: AnyTensor) -> tuple[float, ...]:
        """The logits of the classes, from the hidden states [L, hidden] of one text."""


class Model(Protocol):
    """A decoder-only language model over a paged KV cache. Holds no per-request state."""

    @property
    def kv_layout(self) -> KVLayout:
        """What to allocate."""

    @property
    def ops(self) -> OpTable:
        """What its layers are computed with, chosen when it was loaded."""

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits; every token id is checked against it."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence the positions allow, in tokens."""

    @property
    def device(self) -> torch.device | Device:
        """Where weights and KV live."""

    @property
    def fingerprint(self) -> str:
        """Stable name of weights, dtype and kernel set (hex digest)."""

    @property
    def exact(self) -> bool:
        """Whether a row's bits never depend on its batch; it may be False for a fallback model."""

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Write the step's KV, return the final normed hidden states: [T, hidden], or those of
        `batch.emitting` only, [E, hidden], with the same bits.
        """

    def logits(self, hidden: AnyTensor, lora: LoRAMapping | None = None) -> AnyTensor:
        """[E, hidden] -> [E, V] fp32, soft-capped and scaled as in the architecture; a tensor of
        the same class as `hidden`. `lora`: the adapters of the E.
        """


@runtime_checkable
class FeatureModel(Model, Protocol):
    """A layer that drafts from hidden states of a target, `ForwardBatch.features`: that of EAGLE,
    or a prediction layer of the target's own checkpoint.
    """

    name: str
    """`eagle`, `eagle3` or `mtp`."""
    aux_layers: tuple[int, ...]
    """Layers of the target whose inputs are the features; () for its final hidden states."""
    target_ids: npt.NDArray[np.int64] | None
    """[draft V] the target's ids of its own vocabulary; None where they are equal."""

    @property
    def feature_sizes(self) -> tuple[int, int]:
        """Elements of a feature from the target, and of one that it predicted itself."""

    def with_ops(self, ops: OpTable) -> FeatureModel:
        """The same model and weights on another op table, which must read these weights."""
