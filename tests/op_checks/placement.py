"""Moves the inputs of a case to another device, with every tensor that they contain."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import torch

__all__ = ["moved"]

T = TypeVar("T")


def moved(value: T, device: torch.device | None) -> T:
    """`value` with all tensors on the device, in tuples, lists and structs too; None: as it is."""
    return value if device is None else _moved(value, device)  # type: ignore[return-value]


def _moved(value: object, device: torch.device) -> object:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple | list):
        return type(value)(_moved(one, device) for one in value)
    if isinstance(value, msgspec.Struct):
        fields = {name: _moved(getattr(value, name), device) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields)
    return value
