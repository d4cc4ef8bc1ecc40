"""Where one expert's tensors are in files that hold a projection of all experts at once.

The packing reads expert by expert, `...experts.3.gate_up_proj.weight` [2 * width, hidden] with the
gate's rows above up's. Files hold one of these layouts, gpt-oss's first:

- `...experts.gate_up_proj` [E, hidden, 2 * width] and `...experts.gate_up_proj_bias`
  [E, 2 * width]: inputs first, gate and up in turn, as transformers saves it;
- MXFP4, as released: `..._blocks` [E, 2 * width, hidden / 32, 16], two quantized values a byte, and
  `..._scales` [E, 2 * width, hidden / 32] and the same bias, gate and up in turn as well;
- gate above up: `...experts.gate_up_proj` [E, 2 * width, hidden] (Gemma 4), or with inputs first
  (Qwen3-VL as released), and `...experts.down_proj` likewise.

Names and shapes only, without torch; `fused_experts_source` reads them. Used by
`checkpoint.weights`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.tensor_schema import Shapes
from quickstep.model.decoder_spec import STANDARD_NAMING, ModelSpec
from quickstep.model.quantization import MatrixFormat

_ONE_BY_ONE = STANDARD_NAMING.expert_parts
_ALL = ("gate_up_proj", "gate_up_proj", "down_proj")
MXFP4_BLOCK = 32  # weights that share a scale
_MXFP4_KEYS = frozenset(("quant_method", "modules_to_not_convert", "dequantize"))


class ExpertTensor(msgspec.Struct, frozen=True):
    """One expert's weight or bias: number `index` of what the files hold as `name`.

    `layer` is what a layer's experts have in common; `interleaved`: gate and up alternate.
    """

    layer: str
    name: str
    index: int
    is_bias: bool
    interleaved: bool


class FusedExperts(msgspec.Struct, frozen=True):
    """The layout of a checkpoint's experts, which its tensors were not yet compared with."""

    folder: str  # between the name of a layer and an expert's number
    gate_up: str
    num_experts: int
    is_mxfp4: bool
    gate_above_up: bool = False
    outputs_first: bool = False

    def find(self, name: str) -> ExpertTensor | None:
        """The place of an expert's tensor; None for a tensor that belongs to no expert."""
        layer, found, rest = name.partition(f".{self.folder}.")
        if not found:
            return None
        number, module, kind = rest.split(".")
        is_bias = kind == "bias"
        held = f"{layer}.{self.folder}.{module}{'_bias' if is_bias else ''}"
        interleaved = module == self.gate_up and not self.gate_above_up
        return ExpertTensor(layer, held, int(number), is_bias, interleaved)

    def parts(self, name: str, shape: tuple[int, ...]) -> Shapes | None:
        """The tensors of the files that hold it; None for what belongs to no expert.

        Raises:
            ConfigError: A matrix that MXFP4 has no blocks for.
        """
        tensor = self.find(name)
        if tensor is None:
            return None
        if tensor.is_bias:
            return {tensor.name: (self.num_experts, *shape)}
        outputs, inputs = shape
        if not self.is_mxfp4:
            stored = (outputs, inputs) if self.outputs_first else (inputs, outputs)
            return {tensor.name: (self.num_experts, *stored)}
        if inputs % MXFP4_BLOCK:
            raise ConfigError(
                f"{name} has {inputs} inputs, MXFP4 has them in blocks of {MXFP4_BLOCK}"
            )
        scales = (self.num_experts, outputs, inputs // MXFP4_BLOCK)
        return {
            f"{tensor.name}_blocks": (*scales, MXFP4_BLOCK // 2),
            f"{tensor.name}_scales": scales,
        }

    def form(self, name: str, shape: tuple[int, ...]) -> MatrixFormat | None:
        """How the native kernels hold an expert's matrix in MXFP4; None for all other tensors."""
        tensor = self.find(name)
        if tensor is None or tensor.is_bias or not self.is_mxfp4:
            return None
        group_size = None if shape[1] == MXFP4_BLOCK else MXFP4_BLOCK
        return MatrixFormat(6, group_size, wide_scales=True, has_levels=True)


def one_by_one(spec: ModelSpec) -> ModelSpec:
    """The spec before `as_stored`."""
    naming = spec.naming
    if not (naming.fused_experts and naming.gate_above_up and naming.expert_parts == _ALL):
        return spec
    apart = replace(naming, fused_experts=False, gate_above_up=False, expert_parts=_ONE_BY_ONE)
    return replace(spec, naming=apart)


def as_stored(spec: ModelSpec, shapes: Shapes) -> ModelSpec:
    """The spec with experts under the names that the files have: one by one, or a projection of all
    in one tensor with gate above up, as newer files have them.
    """
    naming = spec.naming
    if spec.moe is None or naming.fused_experts or naming.expert_parts != _ONE_BY_ONE:
        return spec
    end = f".{naming.experts}.{_ALL[0]}"
    if not any(name.endswith(end) for name in shapes):
        return spec
    fused = replace(naming, fused_experts=True, gate_above_up=True, expert_parts=_ALL)
    return replace(spec, naming=fused)


def find_fused_experts(
    spec: ModelSpec, stored_as: Mapping[str, object], shapes: Shapes
) -> FusedExperts | None:
    """The layout of experts in one tensor; None for an architecture whose experts have their own.

    `stored_as` is the config's `quantization_config`, `shapes` are those of the files.

    Raises:
        ConfigError: The experts are stored in another way.
    """
    if not spec.naming.fused_experts or spec.moe is None:
        return None
    method = str(stored_as.get("quant_method", "")).lower()
    if stored_as and (method != "mxfp4" or spec.naming.gate_above_up):
        raise ConfigError(
            f"the checkpoint is quantized by {method or 'an unnamed method'}; of "
            f"{spec.architecture} those are supported that are not quantized or are mxfp4"
        )
    strange = sorted(set(stored_as) - _MXFP4_KEYS)
    if strange:
        raise ConfigError(
            f"config.json's quantization_config sets {strange[0]!r}, which is not known of mxfp4"
        )
    naming, moe = spec.naming, spec.moe
    gate_up = naming.expert_parts[0]
    end = f".{naming.experts}.{gate_up}"
    stored = next((shape for name, shape in shapes.items() if name.endswith(end)), ())
    outputs_first = naming.gate_above_up and stored[1:] == (
        2 * moe.intermediate_size,
        spec.hidden_size,
    )
    return FusedExperts(
        naming.experts,
        gate_up,
        moe.num_experts,
        bool(stored_as),
        naming.gate_above_up,
        outputs_first,
    )
