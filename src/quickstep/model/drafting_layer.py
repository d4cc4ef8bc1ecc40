"""`DraftingLayer`: what all layers have of the target for which they draft (`eagle`, `mtp`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quickstep.model.decoder import Decoder
from quickstep.ops.table import OpTable
from quickstep.ops.tensors import Device

if TYPE_CHECKING:
    import torch


class DraftingLayer:
    """A part of `model.interface.FeatureModel`; subclasses add the layer."""

    def __init__(self, target: Decoder, ops: OpTable, max_model_len: int) -> None:
        self._target = target
        self._ops = ops
        self._max_model_len = max_model_len

    @property
    def ops(self) -> OpTable:
        """What it computes with."""
        return self._ops

    @property
    def vocab_size(self) -> int:
        """V of the target, whose token ids are its inputs."""
        return self._target.vocab_size

    @property
    def max_model_len(self) -> int:
        """Longest sequence, in tokens."""
        return self._max_model_len

    @property
    def device(self) -> torch.device | Device:
        """Where weights and KV live."""
        return self._target.device

    @property
    def fingerprint(self) -> str:
        """That of the target: drafts change no output."""
        return self._target.fingerprint

    @property
    def exact(self) -> bool:
        """Whether a row's bits never depend on its batch."""
        return True
