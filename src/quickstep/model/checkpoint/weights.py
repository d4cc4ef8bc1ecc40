"""A checkpoint's tensors against its spec: which there must be, in which form they are stored.

`open_weights` reads only headers, and returns only what it has checked: every tensor is there, in
the right shape and type. The loader reads tensors through it; the assembly learns how many bytes
the weights will need before anything large is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.gguf_file import BLOCKS
from quickstep.model.checkpoint.gguf_names import is_gguf
from quickstep.model.checkpoint.gguf_spec import gguf_tensor_files
from quickstep.model.checkpoint.safetensors_files import (
    StoredTensor,
    TensorFiles,
    open_tensor_files,
)
from quickstep.model.checkpoint.source import reading_checkpoint
from quickstep.model.checkpoint.tensor_reader import STORED_DTYPES
from quickstep.model.checkpoint.tensor_schema import (
    LATENT_HEADS,
    UNREAD_KEYS,
    Shapes,
    is_fixed_scale,
    layer_tensors,
    outer_tensors,
)
from quickstep.model.decoder_spec import (
    DELTA_PROJECTIONS,
    FUSED_DELTA,
    GGUF_DELTA,
    ModelSpec,
)
from quickstep.model.formats.detect import (
    find_storage,
    quantization_config,
    read_quantization,
)
from quickstep.model.formats.fused_experts import FusedExperts, as_stored, find_fused_experts
from quickstep.model.quantization import MatrixFormat, common_form
from quickstep.model.spec import read_config

if TYPE_CHECKING:
    from quickstep.model.formats.storage import MatrixStorage

# Parts of a quantized matrix, as the formats that are read and some others call them.
_QUANTIZED_PARTS = re.compile(
    r".+\.(qweight|qzeros|weight_packed|weight_scale(_inv|_2)?|weight_zero_point|absmax|scales|SCB"
    r"|biases|quant_map|weight_blocks|(gate_up_proj|down_proj)_(blocks|scales))"
)
# Buffers of older exports: rotary tables, causal masks, what Transformer Engine keeps.
_BUFFERS = re.compile(r"(.+\.)?(rotary_emb\.\w+|inv_freq|masked_bias|position_ids|_extra_state)")
# A module at the top that reads the last states next to the output projection: a trainer's head,
# a classifier, layers that predict several tokens. No token depends on it.
_OTHER_HEADS = re.compile(r"(model\.)?(\w*heads?\d*|score|classifier|qa_outputs|mtp\w*)\..+")

# Matrices that are packed below one another.
_STACKS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    (*DELTA_PROJECTIONS, *FUSED_DELTA),
)


class DecoderNames(msgspec.Struct, frozen=True):
    """The decoder's prefix, the output projection's name, and whether that one is stored."""

    prefix: str
    lm_head: str
    head_stored: bool

    @property
    def embed_tokens(self) -> str:
        """The embedding's name."""
        return f"{self.prefix}embed_tokens.weight"


class CheckpointWeights(msgspec.Struct, frozen=True, dict=True):
    """What a native checkpoint holds.

    Attributes:
        storage: The format of quantized matrices; None if no matrix is quantized.
        shapes: All tensors that the architecture needs, as it sees them.
        experts: How the files hold experts that share one tensor; None where each has its own.
    """

    spec: ModelSpec
    config: Mapping[str, object]
    files: TensorFiles
    storage: MatrixStorage | None
    names: DecoderNames
    shapes: Shapes
    experts: FusedExperts | None = None

    @cached_property
    def stored(self) -> Shapes:
        """The tensors that the files must hold for `shapes`. Raises ConfigError."""
        found: Shapes = {}
        for name, shape in self.shapes.items():
            found.update(self._parts(name, shape) or {name: shape})
        return found

    def _parts(self, name: str, shape: tuple[int, ...]) -> Shapes | None:
        """The tensors that hold what the architecture sees as one; None where it is stored so."""
        if self.experts is not None:
            return self.experts.parts(name, shape)
        return None if self.storage is None else self.storage.parts(name, shape)

    @property
    def quantized(self) -> bool:
        """Whether any matrix is stored in quantized values."""
        if self.experts is not None:
            return any(self._form(name, shape) is not None for name, shape in self.shapes.items())
        storage = self.storage
        if storage is None:
            return False
        return any(storage.parts(name, shape) is not None for name, shape in self.shapes.items())

    def quantized_bytes(
        self, dtype_bytes: int, quantization: str | None, *, natively: bool
    ) -> int | None:
        """`held_bytes`; None if no matrix is held in the quantized values of the files: those of
        MXFP4 are dequantized for torch's ops and rounded by `--quantization`.
        """
        are_kept = self.experts is None or (natively and quantization is None)
        return (
            self.held_bytes(dtype_bytes, natively=natively) if are_kept and self.quantized else None
        )

    def held_bytes(self, dtype_bytes: int, *, natively: bool) -> int:
        """Bytes of the weights in memory, for a model's dtype of so many bytes.

        The native kernels hold numbers in e4m3 in that dtype, and the matrices of a stack in forms
        of their own. Torch's ops hold e4m3, a stack in one form, 6 bits in bytes, and experts in
        MXFP4 in that dtype.
        """
        total = 0
        stacks: dict[str, list[str]] = {}
        for name in self.shapes:
            stacks.setdefault(_stack_of(name), []).append(name)
        for names in stacks.values():
            forms = [self._held_form(name, natively=natively) for name in names]
            if None in forms:
                total += sum(math.prod(self.shapes[name]) for name in names) * dtype_bytes
            elif natively:
                total += sum(
                    form.num_bytes((outputs, self.shapes[names[0]][1]))
                    for form, outputs in self._in_forms(names)
                )
            else:
                inputs = self.shapes[names[0]][1]
                outputs = sum(self.shapes[name][0] for name in names)
                common = common_form([form for form in forms if form is not None], inputs)
                total += common.num_bytes((outputs, inputs))
        if self.spec.tied and self.names.head_stored:
            head = self.shapes[self.names.lm_head]
            form = self._held_form(self.names.lm_head, natively=natively)
            total -= math.prod(head) * dtype_bytes if form is None else form.num_bytes(head)
        return total

    def _held_form(self, name: str, *, natively: bool) -> MatrixFormat | None:
        form = self._form(name, self.shapes[name])
        if form is None or (form.is_float8 if natively else self.experts is not None):
            return None
        if natively:
            return form
        return replace(form, bits=8 if form.bits == 6 else form.bits, has_levels=False)

    def _in_forms(self, names: Sequence[str]) -> Iterator[tuple[MatrixFormat, int]]:
        """The matrices of a stack, each with its outputs: tensors of one type and form that follow
        one another are one (`OpTable.load_linear`).
        """

        def kind_of(name: str) -> tuple[str | None, MatrixFormat | None]:
            stored = self.files.tensors.get(name)
            kind = None if stored is None else stored.dtype
            return kind, self._form(name, self.shapes[name])

        for (_, form), matrix in groupby(names, kind_of):
            assert form is not None
            yield form, sum(self.shapes[name][0] for name in matrix)

    def of_part(
        self, spec: ModelSpec, start: str, shapes_of: Callable[[ModelSpec], Shapes]
    ) -> CheckpointWeights:
        """Those of another part of the files, whose names begin with `start`; its experts may be
        stored in another way. Raises ConfigError.
        """
        in_files = {
            name: tensor.shape
            for name, tensor in self.files.tensors.items()
            if name.startswith(start)
        }
        spec = as_stored(spec, in_files)
        experts = find_fused_experts(spec, quantization_config(self.config), in_files)
        storage = None if experts is not None else find_storage(self.config, self.files)
        parts = storage, self.names, shapes_of(spec), experts
        return CheckpointWeights(spec, self.config, self.files, *parts)

    def check(self) -> None:
        """Raise ConfigError, in one sentence, where files and architecture differ."""
        what = f"the checkpoint and {self.spec.architecture} differ"
        expected, tensors = self.check_stored(what), self.files.tensors
        unused = [name for name in tensors if name not in expected]
        unexpected = [name for name in unused if not self._ignored(tensors[name])]
        if unexpected:
            kinds = sorted({tensors[name].dtype for name in unexpected})
            raise ConfigError(
                f"{what}: {some_tensors(unexpected)} not part of the architecture (stored as "
                f"{', '.join(kinds)}){self._without_config()}"
            )

    def check_stored(self, what: str) -> Shapes:
        """The tensors that the files must hold for `shapes`. Raises ConfigError, a sentence that
        begins with `what`, where they do not.
        """
        expected, tensors = self.stored, self.files.tensors
        missing = [name for name in expected if name not in tensors]
        if missing:
            hint = self._why_missing(missing)
            raise ConfigError(f"{what}: {some_tensors(missing)} missing from the files{hint}")
        for name, shape in expected.items():
            stored = tensors[name].shape
            if stored != shape:
                raise ConfigError(
                    f"{what}: tensor {name!r} has shape {list(stored)}, config.json asks for "
                    f"{list(shape)}"
                )
        plain = (name for name, shape in self.shapes.items() if self._parts(name, shape) is None)
        for name in plain:
            if tensors[name].dtype not in (*STORED_DTYPES, *(BLOCKS if self._in_blocks else ())):
                raise ConfigError(
                    f"{what}: tensor {name!r} is stored as {tensors[name].dtype}; supported are "
                    f"{', '.join(STORED_DTYPES)}{self._without_config()}"
                )
        return expected

    def unused(self) -> tuple[str, ...]:
        """Heads, layers and fixed scales in the files that no token depends on: not read."""
        expected = self.stored
        others = (name for name in self.files.tensors if name not in expected)
        return tuple(name for name in others if self._is_beside(name) or is_fixed_scale(name))

    def has_float8(self) -> bool:
        """Whether a matrix is stored in e4m3."""
        forms = (self._form(name, shape) for name, shape in self.shapes.items())
        return any(form is not None and form.is_float8 for form in forms)

    def loaded_names(self) -> DecoderNames:
        """The names of what is to be loaded: a tied model that stores its embedding twice, byte for
        byte, has one matrix. Raises ConfigError.
        """
        names = self.names
        if not (self.spec.tied and names.head_stored):
            return names
        outer = (names.embed_tokens, names.lm_head)
        parts = [list(self._parts(name, self.shapes[name]) or (name,)) for name in outer]
        is_same = len(parts[0]) == len(parts[1]) and all(
            self.files.equal(a, b) for a, b in zip(*parts, strict=True)
        )
        return msgspec.structs.replace(names, head_stored=not is_same)

    def other_parts(self) -> tuple[str, ...]:
        """The other parts of a larger model than its decoder, by the modules that hold them."""
        found = filter(self._is_of_another_part, set(self.files.tensors) - set(self.stored))
        return tuple(sorted({_module_at_top(name) for name in found}))

    def rounded_again(self) -> tuple[str, ...]:
        """The matrices whose stored values no product here reads: they are rounded once more."""
        forms = ((name, self._form(name, shape)) for name, shape in self.shapes.items())
        return tuple(name for name, form in forms if form is not None and form.is_rounded_again)

    @property
    def _in_blocks(self) -> bool:
        """Whether the files are GGUF's, whose types the reader of the file has checked."""
        return self.storage is not None and self.storage.name == "gguf"

    def _why_missing(self, missing: list[str]) -> str:
        """What the files hold instead, if that shows what is wrong."""
        without_config = self._without_config()
        if without_config:
            return without_config
        ends = {name.removeprefix(self.names.prefix) for name in missing}
        other = next(
            (name for name in self.files.tensors for end in ends if name.endswith(f".{end}")), None
        )
        if other is not None and len(missing) > 1:
            known = ", ".join(repr(prefix) for prefix in self.spec.naming.prefixes)
            return f"; they hold {other!r}: names of the decoder begin with {known}"
        if self.names.lm_head in missing:
            return "; set tie_word_embeddings in config.json if the embedding is the projection"
        return "; download the checkpoint again"

    def _without_config(self) -> str:
        """A sentence's end where tensors are quantized and the config does not say how."""
        if self.storage is not None or self.experts is not None:
            return ""
        name = next((name for name in self.files.tensors if _QUANTIZED_PARTS.fullmatch(name)), None)
        if name is None:
            return ""
        return (
            f"; {name!r} belongs to a quantized matrix, and config.json has no quantization_config "
            "that says how it is stored"
        )

    def _form(self, name: str, shape: tuple[int, ...]) -> MatrixFormat | None:
        if self.experts is not None:
            return self.experts.form(name, shape)
        if self.storage is None or self.storage.parts(name, shape) is None:
            return None
        if name.endswith(f".{LATENT_HEADS}.weight"):
            return None  # held in the model's dtype
        return self.storage.form(name, shape)

    def _ignored(self, tensor: StoredTensor) -> bool:
        """Tensors that compute nothing here: old buffers, a vision tower, another head."""
        name = tensor.name
        if _BUFFERS.fullmatch(name):
            return True
        module = self.spec.naming.ignored_module
        if module is not None and f".{module}." in name:
            return True
        if name.endswith(".bias") and len(tensor.shape) == 4:
            return True  # a causal mask [1, 1, n, n]; a bias of outputs has one dimension
        if self._is_unread_key(name):
            return True
        if self._is_beside(name) or self._is_of_another_part(name):
            return True
        return self.storage is not None and self.storage.has_no_effect(name)

    def _is_of_another_part(self, name: str) -> bool:
        """Whether it belongs to another part than the decoder of a larger model."""
        return self.spec.naming.wrapped and not name.startswith(self.names.prefix)

    def _is_unread_key(self, name: str) -> bool:
        """Whether it makes keys or values of a layer that reads those of another one."""
        layer = re.match(rf"{re.escape(self.names.prefix)}layers\.(\d+)\.", name)
        if layer is None or int(layer[1]) >= self.spec.num_layers:
            return False
        shares = self.spec.layers[int(layer[1])].kv_from is not None
        return shares and name[layer.end() :].startswith(UNREAD_KEYS)

    def _is_beside(self, name: str) -> bool:
        """Whether it belongs to another head, or to a layer after the last one."""
        layer = re.match(rf"{re.escape(self.names.prefix)}layers\.(\d+)\.", name)
        if layer is not None:
            return int(layer[1]) >= self.spec.num_layers
        heads = tuple(f"{head.removesuffix('.weight')}." for head in self.spec.naming.heads)
        return _OTHER_HEADS.fullmatch(name) is not None and not name.startswith(heads)


def open_checkpoint_files(path: str | Path) -> TensorFiles:
    """The tensors of a checkpoint directory or a GGUF file. Raises ConfigError."""
    with reading_checkpoint(path):
        return gguf_tensor_files(Path(path)) if is_gguf(path) else open_tensor_files(path)


def open_weights(path: str | Path, spec: ModelSpec) -> CheckpointWeights:
    """Read what a native checkpoint holds.

    Raises:
        ConfigError: The files cannot be read, their format is not supported, or they differ from
            the architecture.
    """
    with reading_checkpoint(path):
        weights = _open_weights(path, spec)
        weights.check()
        return weights


def _open_weights(path: str | Path, spec: ModelSpec) -> CheckpointWeights:
    config = read_quantization(Path(path), read_config(path))
    files = _renamed(open_checkpoint_files(path), spec.naming.renames)
    in_files = {name: tensor.shape for name, tensor in files.tensors.items()}
    spec = _with_stored_delta(as_stored(spec, in_files), in_files)
    names = _names(spec, files)
    shapes = outer_tensors(spec, names.prefix, names.lm_head)
    if names.head_stored:
        shapes[names.lm_head] = (spec.vocab_size, spec.hidden_size)
    for index in range(spec.num_layers):
        shapes.update(layer_tensors(spec, names.prefix, index))
    experts = find_fused_experts(spec, quantization_config(config), in_files)
    storage = None if experts is not None else find_storage(config, files)
    return CheckpointWeights(spec, config, files, storage, names, shapes, experts)


def _with_stored_delta(spec: ModelSpec, shapes: Shapes) -> ModelSpec:
    """The spec with the fused projections of Gated DeltaNet that older GGUF files have."""
    is_fused = any(name.endswith(f".{FUSED_DELTA[0]}.weight") for name in shapes)
    if spec.naming.delta != GGUF_DELTA or not is_fused:
        return spec
    return replace(spec, naming=replace(spec.naming, delta=FUSED_DELTA))


def _renamed(files: TensorFiles, renames: Sequence[tuple[str, str]]) -> TensorFiles:
    """The same tensors by their standard names (`TensorNaming.renames`)."""
    if not renames:
        return files
    tensors = {}
    for name, tensor in files.tensors.items():
        for part, standard in renames:
            name = name.replace(part, standard)
        tensors[name] = replace(tensor, name=name)
    return replace(files, tensors=tensors)


def _names(spec: ModelSpec, files: TensorFiles) -> DecoderNames:
    """The decoder's prefix and the output projection's name in these files. The decoder by itself,
    as models for embeddings have it, is stored without the `model.` before its names.
    """
    naming = spec.naming
    by_itself = [prefix.removeprefix("model.") for prefix in naming.prefixes]
    modules = {name.rpartition(".")[0] for name in files.tensors if not name.endswith(".bias")}
    used = [each for each in (*naming.prefixes, *by_itself) if f"{each}embed_tokens" in modules]
    heads = [name for name in naming.heads if name.removesuffix(".weight") in modules]
    return DecoderNames((used or naming.prefixes)[0], (heads or naming.heads)[0], bool(heads))


def _module_at_top(name: str) -> str:
    """`visual` of `model.visual.blocks.0.norm.weight`."""
    return name.removeprefix("model.").partition(".")[0]


def _stack_of(name: str) -> str:
    """A name for the matrix that a tensor becomes a part of."""
    start, _, module = name.removesuffix(".weight").rpartition(".")
    stack = next((parts for parts in _STACKS if module in parts), None)
    return name if stack is None or name.endswith(".bias") else f"{start}.{stack[0]}"


def some_tensors(names: Sequence[str]) -> str:
    """The subject of a sentence on tensors, with its verb."""
    if len(names) == 1:
        return f"tensor {names[0]!r} is"
    return f"{len(names)} tensors ({names[0]!r}, ...) are"
