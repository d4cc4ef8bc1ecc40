"""Contexts beyond a model's limit: refused, or allowed with its rotary positions scaled.

The way is YaRN (arXiv:2309.00071) by the ratio of the lengths; positions that the checkpoint scales
by a method of its own keep it, with a factor that is larger by the ratio. YaRN is static: every
position has one rotation, so that attention still depends on distances only, cached prefixes stay
valid and the same request has the same bits. Dynamic NTK would leave short requests as they are,
but its keys and queries beyond the limit are rotated by different bases.
"""

from __future__ import annotations

from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.decoder_spec import LongContext, ModelSpec
from quickstep.model.rope_spec import RopeKind, RopeSpec

__all__ = ["with_context"]


def with_context(spec: ModelSpec, max_model_len: int | None, allow_longer: bool) -> ModelSpec:
    """The spec, with scaled positions if `max_model_len` is above its limit.

    Raises:
        ConfigError: It is, and that is not allowed or not possible.
    """
    limit = spec.max_model_len
    if max_model_len is None or max_model_len <= limit:
        return spec
    if not allow_longer:
        raise ConfigError(
            f"--max-model-len is {max_model_len}, the model's limit is {limit}; lower it, or add "
            "--allow-long-context, which scales the model's positions (answers may suffer)"
        )
    if not spec.native or not spec.ropes:
        raise ConfigError(
            f"--allow-long-context is not supported for {spec.architecture}: its positions cannot "
            f"be scaled; lower --max-model-len to {limit}"
        )
    ratio = max_model_len / limit
    # a layer with a window sees no distance that it was not trained for
    wide = {layer.rope for layer in spec.layers if layer.window is None or layer.window > limit}
    ropes = tuple(
        _scaled(rope, ratio, limit) if index in wide else rope
        for index, rope in enumerate(spec.ropes)
    )
    kinds = sorted({ropes[index].kind.value for index in wide if index is not None})
    scaling = LongContext(" and ".join(kinds) or RopeKind.DEFAULT.value, ratio, limit)
    note = (
        f"max_model_len {max_model_len} is above the model's limit of {limit}: its positions are "
        f"scaled ({scaling.rope_type}, factor {ratio:g}), answers may suffer"
    )
    return replace(
        spec,
        max_model_len=max_model_len,
        ropes=ropes,
        long_context=scaling,
        notes=(*spec.notes, note),
    )


def _scaled(rope: RopeSpec, ratio: float, limit: int) -> RopeSpec:
    if rope.kind is RopeKind.DEFAULT:
        return replace(rope, kind=RopeKind.YARN, factor=ratio, trained_len=limit)
    if rope.kind is RopeKind.LONGROPE:
        raise ConfigError(
            "--allow-long-context is not supported for longrope, whose factors are of one length; "
            f"lower --max-model-len to {limit}"
        )
    return replace(rope, factor=rope.factor * ratio)
