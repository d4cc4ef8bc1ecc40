"""Checkpoints with mistakes in any place: what the readers make of them.

    python mutated_files.py CHECKPOINTS SEED      as `make fuzz` calls it

Each checkpoint is loaded as far as possible, its matrices by the native kernels. That ends in an
ordinary result or in one `ConfigError` of one short line, and takes no memory for sizes that only a
header claims. Checkpoints are a function of the seed.
"""

from __future__ import annotations

import faulthandler
import json
import random
import shutil
import struct
import sys
import tempfile
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import gguf_files
import numpy as np
from gguf_models import KINDS, MIXTURES, VOCAB, write_model
from published_formats import EXACT, ROUNDED_AGAIN
from quantized_checkpoint import write_quantized

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.tensor_reader import TensorReader, TensorSource
from quickstep.model.checkpoint.weights import open_weights
from quickstep.model.formats.detect import open_quantized_reader
from quickstep.model.spec import read_spec
from quickstep.ops.native.backend import load_native
from quickstep.ops.table import OpTable
from quickstep.ops.tensors import BFLOAT16, CPU
from quickstep.text.tokenizer import Tokenizer

_CASES = ("awq-g32", "gptq4-g32", "packed4-asymmetric", "packed4-act-order", "float8-block")
_CASES += ("fp8-block", "modelopt-nvfp4", "packed-nvfp4", "bnb-int8", "gptq-act-order")
_CASES += ("nf4-nested", "auto-round-gptq")
_GGUF_FILES = [("llama", "Q4_K_M", KINDS), ("qwen3", "Q4_K_M", KINDS)]
_GGUF_FILES += [("llama", mixture, kinds) for mixture, kinds in MIXTURES.items()]
_NUMBERS = (0, 1, 7, -1, 2**16, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
_VALUES = (*_NUMBERS, True, None, 1.5, 1e300, "", "I32", "F8_E4M3", "U8", [], [2**63], {}, "x" * 99)
_OF_METADATA = (0, 1, 7, 2**31, 2**32 - 1, True, 1.5, float("nan"), float("inf"), "", "x")
_LISTS_OF_METADATA = ([1, 2], [0, 0], [True, False], [1.5], ["a"], ["a", "a b"])
_FURTHER_KEYS = (
    *("split.count", "split.no", "split.tensors.count", "general.alignment"),
    *(".expert_count", ".attention.key_length", ".attention.value_length", ".vocab_size"),
    *(".rope.scaling.type", ".rope.scaling.factor", ".rope.scaling.attn_factor"),
    *(".rope.scaling.original_context_length", ".attention.sliding_window", ".pooling_type"),
    *("tokenizer.ggml.bos_token_id", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.scores"),
)
_SMALL_BYTES = 4096
_SLACK_BYTES = 32 * 2**20  # of Python's own: an unknown architecture imports a library
_MESSAGE_CHARS = 3000
_WRAPPED = "cannot be loaded: "  # an exception of Python's that no reader has a sentence for

Mutation = Callable[[Path, random.Random], None]


def _truncated(file: Path, rng: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])


def _flipped(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 3, 30))):
        content[rng.randrange(len(content))] = rng.randrange(256)
    file.write_bytes(content)


def _numbered(file: Path, rng: random.Random) -> None:
    """A count, size or offset of a header replaced."""
    content = bytearray(file.read_bytes())
    code, size = rng.choice((("Q", 8), ("I", 4)))
    at = rng.randrange(0, min(len(content), 3000) - size)
    struct.pack_into(f"<{code}", content, at, rng.choice(_NUMBERS) % 2 ** (8 * size))
    file.write_bytes(content)


def _described(file: Path, rng: random.Random) -> None:
    """A field of one tensor in a safetensors header replaced."""
    header, data = _parsed(file)
    name = rng.choice(list(header))
    field = rng.choice(("dtype", "shape", "data_offsets", "", "name"))
    if field == "name":
        header[rng.choice(list(header))] = header.pop(name)
    elif not field:
        header[name] = rng.choice(_VALUES)
    elif field == "dtype" or rng.random() < 0.2:
        header[name][field] = rng.choice(_VALUES)
    elif header[name][field]:
        values = header[name][field]
        values[rng.randrange(len(values))] = rng.choice(_VALUES)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _small_tensor(file: Path, rng: random.Random) -> None:
    """Bytes of a small tensor replaced: scales, zero points, orders, sizes in JSON."""
    header, data = _parsed(file)
    content = bytearray(data)
    spans = [entry["data_offsets"] for entry in header.values()]
    start, end = rng.choice([(a, b) for a, b in spans if a < b <= a + _SMALL_BYTES])
    for _ in range(rng.choice((1, 3, 30))):
        content[rng.randrange(start, end)] = rng.choice((0, 255, 0x30, 0x39, rng.randrange(256)))
    file.write_bytes(file.read_bytes()[: -len(data)] + content)


def _configured(file: Path, rng: random.Random) -> None:
    """A value of the config replaced, or one of how weights are quantized."""
    path = file.parent / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    section = config
    while isinstance(section, dict) and section:
        parent, key = section, rng.choice(list(section))
        section = section[key] if rng.random() < 0.8 else None
    parent[key] = rng.choice(_VALUES)
    path.write_text(json.dumps(config), encoding="utf-8")


def _with_metadata(file: Path, rng: random.Random) -> None:
    """A value of a GGUF file's metadata replaced or added."""
    tensors = [
        (tensor.name, np.array(tensor.data), tensor.tensor_type)
        for tensor in gguf.GGUFReader(file).tensors
    ]
    metadata = gguf_files.sizes() | gguf_files.byte_vocabulary(VOCAB)
    key = rng.choice((*metadata, *_FURTHER_KEYS))
    metadata[key] = rng.choice((*_OF_METADATA, *_LISTS_OF_METADATA))
    gguf_files.write_gguf(file, file.stem, metadata, tensors)


def _parsed(file: Path) -> tuple[dict[str, dict[str, list[object]]], bytes]:
    """The header of a safetensors file, and what follows it."""
    content = file.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + length]), content[8 + length :]


_SAFETENSORS: tuple[Mutation, ...] = (
    *(_truncated, _flipped, _numbered, _described, _described, _small_tensor, _configured),
)
_GGUF: tuple[Mutation, ...] = (_truncated, _flipped, _numbered, _numbered, _with_metadata)


def mutated_results(num_checkpoints: int, seed: int = 0) -> Iterator[str]:
    """One checkpoint after another: "" where it loads, or the sentence that refuses it."""
    ops = load_native(1)
    assert ops is not None
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        sources = list(_written(Path(folder)))
        for _ in range(num_checkpoints):
            path, mutations = rng.choice(sources)
            yield _result(path, rng.choice(mutations), rng, ops)


def _written(folder: Path) -> Iterator[tuple[Path, tuple[Mutation, ...]]]:
    for case in _CASES:
        write_quantized(folder / case, *(EXACT | ROUNDED_AGAIN)[case], num_hidden_layers=1)
        yield folder / case / "a.safetensors", _SAFETENSORS
    for architecture, mixture, kinds in _GGUF_FILES:
        path = folder / f"{architecture}-{mixture}" / f"{architecture}.gguf"
        path.parent.mkdir()
        write_model(path, architecture, kinds)
        yield path, _GGUF


def _result(path: Path, mutate: Mutation, rng: random.Random, ops: OpTable) -> str:
    copy = path.parent.parent / "mutated"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path.parent, copy)
    file = copy / path.name
    mutate(file, rng)
    tracemalloc.start()
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            _load(file if path.suffix == ".gguf" else copy, ops)
        message = ""
    except ConfigError as error:
        message = str(error)
        assert message and "\n" not in message and len(message) < _MESSAGE_CHARS, message
        assert _WRAPPED not in message, message
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    size = path.stat().st_size
    assert peak < 8 * size + _SLACK_BYTES, f"{peak} bytes for a file of {size}: {message}"
    return message


def _load(path: Path, ops: OpTable) -> None:
    """Every matrix of a checkpoint, as a server without torch loads them. Raises ConfigError."""
    spec = read_spec(path)
    weights = open_weights(path, spec)
    assert ops.load_linear is not None
    reader = TensorReader(weights.files, BFLOAT16, CPU, 0, None)
    shapes, config = weights.shapes, weights.config
    source: TensorSource = reader
    if weights.storage is not None:
        source = open_quantized_reader(reader, weights.storage, shapes, config, spec)
    for name, shape in shapes.items():
        stored = source.stored((name,)) if len(shape) == 2 else None
        if stored is None:
            source.tensor(name)
        else:
            ops.load_linear(stored, None)
    if path.suffix == ".gguf":
        Tokenizer.open(path).encode("a text: ab")


if __name__ == "__main__":
    faulthandler.enable()
    total, refused = int(sys.argv[1]), 0
    for number, sentence in enumerate(mutated_results(total, int(sys.argv[2])), 1):
        refused += bool(sentence)
        if number % 500 == 0:
            print(f"{number} checkpoints, {refused} refused: {sentence}", flush=True)
    print(f"{refused} of {total} checkpoints are refused, the others load")
