"""What a decoder knows of its layers: they take a stream, and keep something of each token.

`model.decoder` loops over a `LayerStack`; it never looks into the stream that goes from layer to
layer, so that a model may have one residual or several. Implemented by `residual`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from quickstep.model.decoder_spec import KVSize, StateSize
from quickstep.model.interface import EmittingTokens
from quickstep.ops.table import KVCache, LoRAMapping, PagedLayout, StateRows

if TYPE_CHECKING:
    from torch import Tensor

StreamT = TypeVar("StreamT")


class LayerStep(msgspec.Struct, frozen=True):
    """What all layers read of one step.

    Attributes:
        layout: The tokens' rows and places in the cache.
        kv: The cache; a mixer knows which of its tensors are its own.
        rotations: cos and sin [T, D_rot / 2] of each of the spec's `ropes`.
        lora: The tokens' adapters.
        state_rows: What the rows do with states; None for a model without any.
        inputs: [T, L * I], what each of the L layers gets of its own; None for nothing.
    """

    layout: PagedLayout
    kv: KVCache
    rotations: tuple[tuple[Tensor, Tensor], ...]
    lora: LoRAMapping | None
    state_rows: StateRows | None = None
    inputs: Tensor | None = None

    def of(self, emitting: EmittingTokens) -> LayerStep:
        """The step of the emitting tokens only, which write no more."""
        inputs = None if self.inputs is None else self.inputs[emitting.tokens]
        changes = {"layout": emitting.layout, "lora": emitting.lora, "inputs": inputs}
        return replace(self, rotations=(), **changes)


class Mixer(Protocol):
    """The part of a layer in which tokens read what others left: attention, or a state.

    It is divided in two, as a last layer needs the second half of the emitting tokens only.
    """

    @property
    def kv_size(self) -> KVSize | None:
        """What it keeps of each token in the cache; None for nothing."""

    def write(self, x: Tensor, step: LayerStep) -> tuple[Tensor, ...]:
        """Write what x [T, hidden] leaves to later tokens; return what `read` needs, tensors with a
        row for each of the T.
        """

    def read(self, rows: tuple[Tensor, ...], step: LayerStep) -> Tensor:
        """[T, hidden] of rows that `write` returned, or of some of them with their step."""


class Layer(Protocol[StreamT]):
    """One layer."""

    @property
    def kv_size(self) -> KVSize | None:
        """What it keeps of each token in the cache; None for nothing."""

    def forward(
        self, stream: StreamT, step: LayerStep, emitting: EmittingTokens | None
    ) -> tuple[StreamT, Tensor]:
        """The stream after this layer, and its own input [T, hidden]; with `emitting`, the stream
        of those tokens only.
        """


class LayerStack(msgspec.Struct, frozen=True):
    """The layers in order, with both ends of their stream.

    Attributes:
        begin: Embeddings [T, hidden] -> stream.
        layers: Each takes and returns the stream.
        pack: Stream -> what another process needs to continue it, [T, hidden] each.
        unpack: The stream again.
        states: What the layers with a state keep of a sequence, in their order.
        end: Stream -> [T, hidden], normed. Not called for a stream of no tokens.
        total: Stream -> [T, hidden], not normed.
    """

    begin: Callable[[Tensor], Any]
    layers: tuple[Layer[Any], ...]
    end: Callable[[Any], Tensor]
    total: Callable[[Any], Tensor]
    pack: Callable[[Any], tuple[Tensor, ...]]
    unpack: Callable[[tuple[Tensor, ...]], Any]
    states: tuple[StateSize, ...] = ()
