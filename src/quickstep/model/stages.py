"""Which layers of a model each stage of a pipeline holds.

A stage computes some layers of every step and passes what they leave on to the next one; the last
stage has the final norm and the output projection, and samples. Nothing is computed otherwise than
in one process, so that no bit depends on the number of stages (docs/design/0059).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec

from quickstep.errors import ConfigError
from quickstep.model.adapters.lora_modules import (
    Projection,
    embedding_number,
    expert_number,
    lm_head_number,
    module_number,
)
from quickstep.model.checkpoint.tensor_schema import latent_tensors
from quickstep.model.decoder_spec import ModelSpec
from quickstep.ops.table import LoRAPart

NUM_CARRIED = 2  # tensors [T, hidden] from stage to stage: `model.layers.residual.ResidualStream`


class Stage(msgspec.Struct, frozen=True):
    """One stage of a pipeline: `number` of `size`. The default is the complete model."""

    number: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it begins with the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends with the logits."""
        return self.number == self.size - 1

    def layers(self, spec: ModelSpec) -> range:
        """Its layers: about as many bytes of weights as the other stages have. The output
        projection counts, so that the last stage has fewer layers.
        """
        ends = _ends(spec, self.size)
        return range(ends[self.number], ends[self.number + 1])

    def num_passed(self, spec: ModelSpec, aux_layers: Sequence[int]) -> int:
        """How many of these layers are in stages before it, which pass on their inputs."""
        first = self.layers(spec).start
        return sum(layer < first for layer in aux_layers)


def _ends(spec: ModelSpec, num_stages: int) -> list[int]:
    """The first layer of each stage, and the end of the last."""
    costs = [_weights_of_layer(spec, layer.sparse) for layer in spec.layers]
    costs.append(spec.vocab_size * spec.hidden_size)
    sums = [0, *accumulate(costs)]
    ends = [0]
    for number in range(1, num_stages):
        wanted = sums[-1] * number / num_stages
        # each stage has a layer at least, the ones after it too
        possible = range(ends[-1] + 1, spec.num_layers - (num_stages - number) + 1)
        ends.append(min(possible, key=lambda end: abs(sums[end] - wanted)))
    return [*ends, spec.num_layers]


def _weights_of_layer(spec: ModelSpec, is_sparse: bool) -> int:
    """Elements of a layer's matrices."""
    attention = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_size * spec.hidden_size
    if spec.latent is not None:
        attention = sum(
            math.prod(shape) for _, shape in latent_tensors(spec, spec.latent) if len(shape) > 1
        )
    width = spec.intermediate_size
    if is_sparse and spec.moe is not None:
        width = spec.moe.num_experts * spec.moe.intermediate_size + spec.moe.shared_width
    return attention + spec.hidden_size * 3 * width


def check_stages(spec: ModelSpec, num_stages: int) -> None:
    """Refuse a number of stages that the model does not allow. Raises ConfigError."""
    if num_stages == 1:
        return
    if spec.state_sizes:
        raise ConfigError(
            f"--pipeline-parallel-size is {num_stages}, but {spec.architecture} has layers with "
            "states, which one process computes; leave the option out"
        )
    if not spec.native:
        raise ConfigError(
            f"--pipeline-parallel-size is {num_stages}, but {spec.architecture} runs through "
            "transformers, in one process; leave the option out"
        )
    if not spec.is_uniform or spec.layer_scalars:
        raise ConfigError(
            f"--pipeline-parallel-size is {num_stages}, but layers of {spec.architecture} need "
            "more of the ones before than stages pass on; leave the option out"
        )
    if num_stages > spec.num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size is {num_stages}, but the model has {spec.num_layers} "
            "layers; each stage needs one"
        )


def modules_of_stage(spec: ModelSpec, stage: Stage) -> Iterator[int]:
    """The numbers of the matrices (`adapters.lora_modules`) that a stage has."""
    for layer in stage.layers(spec):
        yield from (module_number(layer, projection) for projection in Projection)
        if spec.moe is not None:
            first = expert_number(spec, layer, 0, Projection.GATE_UP)
            yield from range(first, first + 2 * spec.moe.num_experts)
    if stage.is_first:
        yield embedding_number(spec)
    if stage.is_last:
        yield lm_head_number(spec)


def stage_adapter(
    modules: Sequence[Sequence[LoRAPart]], spec: ModelSpec, stage: Stage
) -> list[list[LoRAPart]]:
    """The parts of an adapter that change a stage's matrices; () for the others."""
    own = frozenset(modules_of_stage(spec, stage))
    return [list(parts) if number in own else [] for number, parts in enumerate(modules)]
