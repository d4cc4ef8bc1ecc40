"""`lora` of a request: adapters by their number, each at a scale. llama.cpp's field."""

from __future__ import annotations

from collections.abc import Sequence

from quickstep.server.generate.adapter import Served
from quickstep.server.generate.sampling import bounded
from quickstep.server.schema.shared_fields import LoRAScale

__all__ = ["adapter_at_scales", "lora_scales"]


def lora_scales(lora: Sequence[LoRAScale], served: Served) -> list[tuple[int, float]]:
    """Adapters and their scales, not too many of them. Raises RequestError."""
    bounded("lora", sum(one.scale != 0 for one in lora), served.limits.adapters, "adapters")
    return [(one.id, one.scale) for one in lora]


def adapter_at_scales(lora: Sequence[LoRAScale] | None, served: Served) -> str | None:
    """For `ParsedRequest.adapter`. Raises RequestError."""
    return None if lora is None else served.adapters.mix(lora_scales(lora, served))
