"""PEFT checkpoints of LoRA adapters: checked as a whole against the base model, then read.

`open_adapter` reads headers only and raises for everything that they show; `read` reads the
tensors, once, in the model's dtype. Only safetensors, never a pickle. Nothing here knows which
adapters are loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np

from quickstep.errors import ConfigError
from quickstep.model.adapters.lora_modules import (
    EMBEDDING,
    LM_HEAD,
    LoRAModule,
    expert_parameters,
    has_bias,
    is_expert,
    lora_modules,
    num_modules,
    own_name,
)
from quickstep.model.adapters.peft_config import CONFIG_FILE, PEFTConfig, read_peft_config
from quickstep.model.checkpoint.safetensors_files import TensorFiles, open_tensor_file
from quickstep.model.checkpoint.source import bundled_adapter, reading_checkpoint
from quickstep.model.checkpoint.tensor_reader import STORED_DTYPES
from quickstep.model.chosen_rows import taken_rows
from quickstep.model.decoder_spec import ModelSpec
from quickstep.ops.table import LoRAPart
from quickstep.ops.tensors import BFLOAT16, FLOAT32, Array, DType, HostTensor

WEIGHTS_FILE = "adapter_model.safetensors"
_CACHE_LINE = 64  # bytes
_SHOWN_CHARS = 500  # of a path that clients choose
_NO_BIASES: Mapping[int, Array] = MappingProxyType({})
_PICKLE = "adapter_model.bin"
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\."
    r"(?:(?P<kind>lora_[AB]\.weight|lora_embedding_[AB]|lora_B\.bias|weight)"
    r"|(?:base_layer\.)?(?P<bias>bias))"
)
# Of `target_parameters`: several parameters of a module are wrappers around each other.
_PARAMETER = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)(?P<depth>(?:\.base_layer)*)"
    r"\.lora_(?P<kind>[AB])\.weight"
)
# peft adds copies of the base model's own embedding or output projection where one is a target.
_BASE_COPY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.base_layer\.weight")
_MODULE = re.compile(r"(?P<prefix>(?:\w+\.)*?)(?P<name>layers\.\d+\..+|embed_tokens|embeddings)")
_PREFIXES = ("", "model.", "language_model.model.", "model.language_model.")


class LoRAWeights(msgspec.Struct, frozen=True):
    """The tensors of an adapter, in the model's dtype.

    Attributes:
        modules: The parts of each of the decoder's matrices, by `lora_modules.module_number`.
        content_id: Hex digest of what the adapter computes: ranks, scales and stored tensors.
        rank: The largest rank.
    """

    modules: tuple[tuple[LoRAPart, ...], ...]
    content_id: str
    rank: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        parts = (part for of_module in self.modules for part in of_module)
        return sum(tensor.nbytes for part in parts for tensor in part.tensors)

    @property
    def has_complete_matrices(self) -> bool:
        """Whether it has matrices in place of the base model's, which have no scale."""
        return any(part.b is None for parts in self.modules for part in parts)


class _ExpertPart(msgspec.Struct, frozen=True):
    """What is of one expert in the A [E * r, inputs] and B [outputs, r * E] of all E of a layer;
    with `is_transposed`, A has the outputs and B the inputs. Source: peft's `lora.ParamWrapper`.
    """

    expert: int
    num_experts: int
    is_transposed: bool

    def cut(self, a: HostTensor, b: HostTensor) -> tuple[HostTensor, HostTensor]:
        """[r, inputs] and [outputs, r]."""
        rank = a.shape[0] // self.num_experts
        of_a = a.numpy()[self.expert * rank : (self.expert + 1) * rank]
        of_b = b.numpy()[:, self.expert :: self.num_experts]
        if self.is_transposed:
            of_a, of_b = of_b.T, of_a.T
        return (
            HostTensor(np.ascontiguousarray(of_a), a.dtype),
            HostTensor(np.ascontiguousarray(of_b), b.dtype),
        )


class _Target(msgspec.Struct, frozen=True):
    """A linear layer or embedding that the adapter changes, by the names of its tensors.

    A low-rank change has `a` and `b`, and may have `lora_bias`; a complete module has `weight`.
    Each may have the trained `bias` of the layer, or there is only that. `part`: its place in the
    tensors of all experts.
    """

    module: LoRAModule
    rank: int
    scale: float
    a: str | None = None
    b: str | None = None
    lora_bias: str | None = None
    weight: str | None = None
    bias: str | None = None
    part: _ExpertPart | None = None

    @property
    def num_rows(self) -> int:
        """The rank as of `LoRAPart`."""
        return self.rank if self.weight is None else self.module.num_outputs

    @property
    def names(self) -> tuple[str | None, ...]:
        """Of all tensors that a target may have."""
        return self.a, self.b, self.lora_bias, self.weight, self.bias

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each tensor, by name."""
        num_inputs, num_outputs = self.module.num_inputs, self.module.num_outputs
        table = (num_inputs, num_outputs) if self.module.is_embedding else (num_outputs, num_inputs)
        rank, part = self.rank, self.part
        if part is not None:
            rank *= part.num_experts
            if part.is_transposed:
                num_inputs, num_outputs = num_outputs, num_inputs
        of_a, of_b, of_bias = (rank, num_inputs), (num_outputs, rank), (num_outputs,)
        shapes = of_a, of_b, of_bias, table, of_bias
        pairs = zip(self.names, shapes, strict=True)
        return {name: shape for name, shape in pairs if name is not None}


class AdapterCheckpoint(msgspec.Struct, frozen=True):
    """A checked adapter, its tensors still in the file. `targets` are in the decoder's order."""

    directory: Path
    files: TensorFiles
    targets: tuple[_Target, ...]
    num_modules: int

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(target.rank for target in self.targets)

    def num_bytes(self, itemsize: int) -> int:
        """Bytes that the native kernels hold it in, with elements of `itemsize` bytes: tensors
        begin at multiples of a cache line. Elements of a byte are int8, with a scale per rank.
        """
        sizes = []
        for target in self.targets:
            module, rank = target.module, target.num_rows
            sizes.append(rank * module.num_inputs * itemsize)
            sizes.append(0 if target.weight else rank * module.num_outputs * itemsize)
            sizes.append(4 * rank if itemsize == 1 else 0)
            sizes.append(4 * module.num_outputs if target.bias or target.lora_bias else 0)
        return sum(-(-size // _CACHE_LINE) * _CACHE_LINE for size in sizes)

    def read(self, dtype: DType, base_biases: Mapping[int, Array] = _NO_BIASES) -> LoRAWeights:
        """Read all tensors. Raises ConfigError for NaN, infinity, or a file that ends early.

        `base_biases` are those of `lora_modules.base_biases`: a part adds the difference.
        """
        with reading_checkpoint(self.directory):
            return self._read(dtype, base_biases)

    def _read(self, dtype: DType, base_biases: Mapping[int, Array]) -> LoRAWeights:
        modules: list[list[LoRAPart]] = [[] for _ in range(self.num_modules)]
        digest = blake2b(digest_size=16)
        of_experts: tuple[tuple[str | None, str | None], tuple[HostTensor, ...]] | None = None
        for target in self.targets:
            kinds = [name is not None for name in target.names]
            digest.update(repr((target.module, target.rank, target.scale, kinds)).encode())
            if target.part is None:
                part = self._part(target, dtype, base_biases, digest)
            else:  # of all experts, which are read once
                names = target.a, target.b
                if of_experts is None or of_experts[0] != names:
                    tensors = (self._tensor(name, dtype, digest) for name in names if name)
                    of_experts = names, tuple(tensors)
                part = _of_expert(target, target.part, *of_experts[1])
            modules[target.module.number].append(part)
        return LoRAWeights(tuple(map(tuple, modules)), digest.hexdigest(), self.rank)

    def _part(
        self, target: _Target, dtype: DType, base_biases: Mapping[int, Array], digest: blake2b
    ) -> LoRAPart:
        module = target.module
        place = module.first_output, target.scale, module.is_embedding
        bias = self._bias(target, base_biases, digest)
        if target.weight is not None:
            a = _inputs_in_order(self._tensor(target.weight, dtype, digest), module)
            a = _in_order(a, module)
            return LoRAPart(a, None, *place, bias=bias)
        if target.a is None or target.b is None:
            shape = (module.num_inputs, 0) if module.is_embedding else (0, module.num_inputs)
            a, b = HostTensor.empty(shape, dtype), HostTensor.empty((module.num_outputs, 0), dtype)
            return LoRAPart(a, b, *place, bias=bias)
        a, b = (self._tensor(name, dtype, digest) for name in (target.a, target.b))
        a, b = _inputs_in_order(a, module), _in_order(b, module)
        if module.is_embedding:
            a = HostTensor(np.ascontiguousarray(a.numpy().T), a.dtype)
        return LoRAPart(a, b, *place, bias=bias)

    def _bias(
        self, target: _Target, base_biases: Mapping[int, Array], digest: blake2b
    ) -> HostTensor | None:
        """What is added to each output; in place of the base model's bias, the difference."""
        found = []
        if target.lora_bias is not None:
            of_b = self._tensor(target.lora_bias, FLOAT32, digest)
            value = _in_order(of_b, target.module).numpy()
            found.append(value * np.float32(target.scale))
        if target.bias is not None:
            trained = self._tensor(target.bias, FLOAT32, digest)
            value = _in_order(trained, target.module).numpy()
            if target.weight is None:
                first = target.module.first_output
                base = base_biases[target.module.number]
                value = value - base[first : first + target.module.num_outputs]
            found.append(value)
        return HostTensor(sum(found[1:], found[0]), FLOAT32) if found else None

    def _tensor(self, name: str, dtype: DType, digest: blake2b) -> HostTensor:
        stored = self.files.tensors[name]
        tensor = HostTensor.empty(stored.shape, STORED_DTYPES[stored.dtype])
        raw = tensor.numpy().reshape(-1).view(np.uint8).data
        self.files.read_into(name, raw)
        digest.update(stored.dtype.encode())
        digest.update(raw)
        tensor = tensor.to(dtype)
        if not _is_finite(tensor):
            raise ConfigError(
                f"{stored.file} holds NaN or infinity in tensor {name!r} (as {dtype.name})"
            )
        return tensor


def open_adapter(
    directory: str | Path,
    spec: ModelSpec,
    max_rank: int,
    roots: Sequence[Path] | None = None,
) -> AdapterCheckpoint:
    """Check an adapter against the base model, without reading its tensors.

    `roots`: the directory and its files must be in one of these, symbolic links followed; None
    allows any place, and the names of bundled adapters (`demo-sql`).

    Raises:
        ConfigError: One sentence with the first thing that is wrong.
    """
    with reading_checkpoint(directory):
        return _open_adapter(directory, spec, max_rank, roots)


def _open_adapter(
    directory: str | Path, spec: ModelSpec, max_rank: int, roots: Sequence[Path] | None
) -> AdapterCheckpoint:
    if not spec.native:
        raise ConfigError(
            f"{spec.architecture} runs through transformers, where adapters are not supported"
        )
    bundled = bundled_adapter(str(directory)) if roots is None else None
    path = bundled or Path(directory)
    if not os.path.isdir(path):  # noqa: PTH112  Path.is_dir raises for names that no disk has
        name = str(directory)
        shown = name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}..."
        raise ConfigError(f"{shown} is no directory, so it is no adapter")
    for file in (path, path / CONFIG_FILE, path / WEIGHTS_FILE):
        _check_place(file, roots)
    config = read_peft_config(path)
    weights = path / WEIGHTS_FILE
    if not weights.is_file():
        if (path / _PICKLE).is_file():
            raise ConfigError(
                f"{path} holds its weights in a pickle ({_PICKLE}), which can run code when it is "
                "opened and is never loaded; save it as safetensors (in peft: "
                "`save_pretrained(..., safe_serialization=True)`)"
            )
        raise ConfigError(f"{path} holds no {WEIGHTS_FILE}, so there are no weights to load")
    files = open_tensor_file(weights)
    _check_vocabulary(weights, files, spec)
    targets = _find_targets(weights, files, config, spec)
    for target in targets:
        _check_target(weights, files, target, max_rank)
    _check_parameters(weights, config, targets, spec)
    return AdapterCheckpoint(path, files, targets, num_modules(spec))


def _check_place(file: Path, roots: Sequence[Path] | None) -> None:
    if roots is None:
        return
    real = file.resolve()
    if not any(real.is_relative_to(root.resolve()) for root in roots):
        raise ConfigError(
            f"{file} leads outside of the directories that adapters may be loaded from"
        )


def _check_vocabulary(weights: Path, files: TensorFiles, spec: ModelSpec) -> None:
    """Raise ConfigError for an adapter that was trained with a vocabulary of another size."""
    known = lora_modules(spec)
    for name, tensor in files.tensors.items():
        found = _BASE_COPY.fullmatch(name) or _TENSOR.fullmatch(name)
        module = None if found is None else _known_module(found["module"], known, spec)
        if module not in _tied(spec) or len(tensor.shape) != 2:
            continue
        axis = 1 if name.endswith("lora_embedding_A") else 0
        inner = ("lora_A.weight", "lora_embedding_B")  # of the rank and the hidden size
        size = tensor.shape[axis]
        if not name.endswith(inner) and size != spec.vocab_size:
            raise ConfigError(
                f"{weights} was trained with a vocabulary of {size} tokens (tensor {name!r} of "
                f"shape {list(tensor.shape)}), the base model has {spec.vocab_size}; serve a base "
                "model whose embeddings were resized as in training, or train without new tokens"
            )


def _find_targets(
    weights: Path, files: TensorFiles, config: PEFTConfig, spec: ModelSpec
) -> tuple[_Target, ...]:
    """The changed layers. Raises unless tensors, targets and the model's layers agree."""
    known = lora_modules(spec)
    found_tensors: dict[str, dict[str, str]] = {}
    full_names: dict[str, str] = {}
    of_parameters = _of_parameters(weights, files, config, spec)
    read = {name for target in of_parameters for name in (target.a, target.b)}
    for name in files.tensors:
        if name in read or _is_base_copy(files, name, known, spec):
            continue
        found = _TENSOR.fullmatch(name)
        module = None if found is None else _known_module(found["module"], known, spec)
        if found is None or module is None or not _has_tensor(found, known[module], spec):
            raise ConfigError(
                f"{weights} has tensor {name!r}, which changes no matrix of {spec.architecture} "
                "that adapters can change"
            )
        kind = (found["kind"] or found["bias"]).replace("embedding_A", "A.weight")
        kind = kind.replace("embedding_B", "B.weight")
        tensors = found_tensors.setdefault(module, {})
        if kind in tensors:
            raise ConfigError(f"{weights} has both {tensors[kind]!r} and {name!r}; remove one")
        tensors[kind] = name
        full_names[module] = found["module"]
    if not found_tensors and not of_parameters:
        raise ConfigError(f"{weights} holds no tensors")
    prefix = _prefix_of(full_names, spec)
    has_experts = any(is_expert(spec, known[module]) for module in found_tensors)
    targets = []
    for module, place in known.items():
        named = module if module == LM_HEAD else f"{prefix}{module}"
        full_name = full_names.get(module, named)
        tensors = found_tensors.get(module, {})
        if not tensors and not has_experts and is_expert(spec, place):
            continue  # a name such as gate_proj, of a training where no expert had it
        expected = _expected_kinds(config, full_name, place, spec)
        extra = next((name for kind, name in tensors.items() if kind not in expected), None)
        if extra is not None:
            raise ConfigError(
                f"{weights} has tensor {extra!r}, but in {CONFIG_FILE} {full_name!r} is no target "
                "for which there is one"
            )
        if len(tensors) < len(expected):
            raise ConfigError(
                f"{weights} holds {len(tensors)} of {len(expected)} tensors for {full_name!r}; "
                f"without {', '.join(sorted(expected - tensors.keys()))} it is incomplete"
            )
        if tensors:
            targets.append(_target(place, config, full_name, tensors))
    if (
        config.ensure_weight_tying
        and spec.tied
        and not found_tensors.keys().isdisjoint(_tied(spec))
    ):
        raise ConfigError(
            f"{weights} changes the embedding and with it the output projection, to which it is "
            f"tied ('ensure_weight_tying' in {CONFIG_FILE}): Quickstep changes one of them only"
        )
    return (*targets, *of_parameters)


def _of_parameters(
    weights: Path, files: TensorFiles, config: PEFTConfig, spec: ModelSpec
) -> tuple[_Target, ...]:
    """The experts of `target_parameters`. The file names the module only: which of its parameters
    a pair of tensors is of, and whether in the order of the stored matrix or of its transpose
    (which depends on the versions of peft and transformers), is what their shapes fit.
    """
    if not config.target_parameters:
        return ()
    known = expert_parameters(spec)
    pairs: dict[tuple[str, str], dict[str, str]] = {}
    for name in files.tensors:
        found = _PARAMETER.fullmatch(name)
        module = None if found is None else _MODULE.fullmatch(found["module"])
        if found is None or module is None or f"{module['name']}.down_proj" not in known:
            continue
        pairs.setdefault((found["module"], found["depth"]), {})[found["kind"]] = name
    fitting = []
    for (full_name, _), names in pairs.items():
        module = _MODULE.fullmatch(full_name)
        assert module is not None, "it is in a pair"
        if len(names) < 2:
            [name] = names.values()
            raise ConfigError(f"{weights} has tensor {name!r} without the other of A and B")
        options = [
            (parameter, is_transposed)
            for parameter in ("gate_up_proj", "down_proj")
            for is_transposed in (False, True)
            if _fits(files, names, known[f"{module['name']}.{parameter}"], is_transposed)
        ]
        if not options:
            raise ConfigError(
                f"{weights} has tensor {names['A']!r} of shape "
                f"{list(files.tensors[names['A']].shape)}, which fits no parameter of the experts "
                f"of {spec.architecture}"
            )
        fitting.append((full_name, module["name"], names, options))
    # of square matrices both orders fit: all of an adapter have one
    orders = {options[0][1] for *_, options in fitting if len(options) == 1}
    targets: list[_Target] = []
    for full_name, module_name, names, options in fitting:
        if len(options) > 1 and len(orders) == 1:
            options = [option for option in options if option[1] in orders]
        if len(options) > 1:
            raise ConfigError(
                f"{weights} has tensor {names['A']!r}, and the experts' matrix is square: nothing "
                "in the file says whether it is transposed"
            )
        [(parameter, is_transposed)] = options
        name = f"{full_name}.{parameter}"
        if not config.targets_parameter(name):
            raise ConfigError(
                f"{weights} has tensor {names['A']!r}, but in {CONFIG_FILE} {name!r} is no target"
            )
        modules = known[f"{module_name}.{parameter}"]
        targets += [
            _Target(
                *(module, config.rank_of(name), config.scale_of(name), names["A"], names["B"]),
                part=_ExpertPart(expert, len(modules), is_transposed),
            )
            for expert, module in enumerate(modules)
        ]
    return tuple(targets)


def _fits(
    files: TensorFiles,
    names: Mapping[str, str],
    modules: Sequence[LoRAModule],
    is_transposed: bool,
) -> bool:
    inputs, outputs = modules[0].num_inputs, modules[0].num_outputs
    if is_transposed:
        inputs, outputs = outputs, inputs
    of_a, of_b = files.tensors[names["A"]].shape, files.tensors[names["B"]].shape
    return (of_a[1:], of_b[:1]) == ((inputs,), (outputs,))


def _check_parameters(
    weights: Path, config: PEFTConfig, targets: Sequence[_Target], spec: ModelSpec
) -> None:
    """Raise ConfigError for `target_parameters` of which there is nothing, or not all layers."""
    if not config.target_parameters:
        return
    known = expert_parameters(spec)
    own = {name: modules[0] for name, modules in known.items() if config.targets_parameter(name)}
    if not own:
        raise ConfigError(
            f"{weights} holds nothing of 'target_parameters' {list(config.target_parameters)} that "
            "adapters can change: they are read for gate_up_proj and down_proj of experts"
        )
    found = {target.module.number for target in targets if target.part is not None}
    missing = next((name for name, module in own.items() if module.number not in found), None)
    if missing is not None:
        raise ConfigError(f"{weights} holds no tensors for {missing!r}, so it is incomplete")


def _of_expert(target: _Target, part: _ExpertPart, a: HostTensor, b: HostTensor) -> LoRAPart:
    a, b = part.cut(a, b)
    module = target.module
    return LoRAPart(a, _in_order(b, module), module.first_output, target.scale, False)


def _expected_kinds(
    config: PEFTConfig, full_name: str, module: LoRAModule, spec: ModelSpec
) -> frozenset[str]:
    """The tensors that a checkpoint has for a module, as `_TENSOR` names them."""
    kinds: set[str] = set()
    if config.saves(full_name):
        kinds |= {"weight", "bias"}
    else:
        if config.targets(full_name):
            kinds |= {"lora_A.weight", "lora_B.weight"}
            if config.lora_bias and not module.is_embedding:
                kinds.add("lora_B.bias")
        if config.trains_bias(full_name):
            kinds.add("bias")
    return frozenset(kinds if has_bias(spec, module) else kinds - {"bias"})


def _target(
    module: LoRAModule, config: PEFTConfig, full_name: str, tensors: Mapping[str, str]
) -> _Target:
    is_low_rank = "lora_A.weight" in tensors
    return _Target(
        module,
        config.rank_of(full_name) if is_low_rank else 0,
        config.scale_of(full_name) if is_low_rank else 1.0,
        tensors.get("lora_A.weight"),
        tensors.get("lora_B.weight"),
        tensors.get("lora_B.bias"),
        tensors.get("weight"),
        tensors.get("bias"),
    )


def _has_tensor(found: re.Match[str], module: LoRAModule, spec: ModelSpec) -> bool:
    """Whether a module can have a tensor of this kind."""
    if found["bias"]:
        return has_bias(spec, module)
    is_low_rank = found["kind"] != "weight"
    return not is_low_rank or module.is_embedding == ("embedding" in found["kind"])


def _prefix_of(full_names: Mapping[str, str], spec: ModelSpec) -> str:
    """What comes before the names of `lora_modules` in this checkpoint, as `model.`."""
    for module, full_name in full_names.items():
        if module != LM_HEAD:
            return full_name.removesuffix(module)
    return spec.naming.prefixes[0]


def _is_base_copy(
    files: TensorFiles, name: str, known: Mapping[str, LoRAModule], spec: ModelSpec
) -> bool:
    """Whether a tensor is a copy of the base model's embedding, in the base model's size."""
    found = _BASE_COPY.fullmatch(name)
    module = None if found is None else _known_module(found["module"], known, spec)
    shape = (spec.vocab_size, spec.hidden_size)
    return module in _tied(spec) and files.tensors[name].shape == shape


def _tied(spec: ModelSpec) -> tuple[str, str]:
    """The embedding and the output projection, which are one matrix in some models."""
    return own_name(EMBEDDING, spec.naming), LM_HEAD


def _known_module(full_name: str, known: Mapping[str, LoRAModule], spec: ModelSpec) -> str | None:
    """The name in `lora_modules`; None for what is no part of the decoder."""
    if f"{full_name}.weight" in spec.naming.heads:
        return LM_HEAD
    found = _MODULE.fullmatch(full_name)
    if found is None or found["prefix"] not in (*_PREFIXES, *spec.naming.prefixes):
        return None
    return found["name"] if found["name"] in known else None


def _check_target(weights: Path, files: TensorFiles, target: _Target, max_rank: int) -> None:
    if target.rank > max_rank:
        raise ConfigError(
            f"{weights} has rank {target.rank}, the limit is {max_rank}; raise --max-lora-rank"
        )
    for name, shape in target.shapes.items():
        tensor = files.tensors[name]
        if tensor.shape != shape:
            raise ConfigError(
                f"{weights} has tensor {name!r} of shape {list(tensor.shape)}; the base model and "
                f"{CONFIG_FILE} need {list(shape)}"
            )
        if tensor.dtype not in STORED_DTYPES:
            raise ConfigError(
                f"{weights} has tensor {name!r} stored as {tensor.dtype}; supported are "
                f"{', '.join(STORED_DTYPES)}"
            )


def _in_order(outputs: HostTensor, module: LoRAModule) -> HostTensor:
    """A row or a number of each output, in the order of the decoder's matrix."""
    return taken_rows(outputs, module.rows) if module.rows else outputs


def _inputs_in_order(matrix: HostTensor, module: LoRAModule) -> HostTensor:
    """Its columns in the order of the inputs of the decoder's matrix."""
    if not module.columns:
        return matrix
    parts = [matrix.numpy()[:, part.start : part.stop] for part in module.columns]
    return HostTensor(np.concatenate(parts, axis=1), matrix.dtype)


def _is_finite(tensor: HostTensor) -> bool:
    if tensor.dtype == BFLOAT16:
        return bool(((tensor.numpy() & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(tensor.numpy()).all())
