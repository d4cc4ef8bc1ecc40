"""`quickstep bench accuracy [MODEL]`: what each format costs, in numbers.

Measures every format of weights and of the KV cache on text beside float32, and on synthetic layers
with outlier channels, llama.cpp's Q8_0 and Q4_0 beside them; `cli.accuracy_report` prints that.
docs/design/0005 says what followed from it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quickstep.cli.accuracy_report import AccuracyReport, print_accuracy
from quickstep.cli.flags.engine import add_model, model_of
from quickstep.cli.flags.parsing import Parser, command, positive_int, token_count
from quickstep.cli.flags.quantization import KV_FORMATS, WEIGHT_FORMATS, FormatPair
from quickstep.config import LoadConfig
from quickstep.errors import ConfigError
from quickstep.ops.torch_import import require_torch

if TYPE_CHECKING:
    from quickstep.bench.outlier_layers import LayerError, OutlierLayer
    from quickstep.bench.text_accuracy import TextAccuracy
    from quickstep.model.checkpoint.source import Checkpoint
    from quickstep.model.decoder_spec import ModelSpec
    from quickstep.model.interface import Model
    from quickstep.ops.table import OpTable

__all__ = ["add_accuracy"]

_TEXT = """\
Measure what formats of weights and of the KV cache lose, beside llama.cpp's Q8_0 and Q4_0
computed in NumPy.

kl          Kullback-Leibler divergence from float32, nats per token: mean, and 99th percentile
top-1       share of tokens at which both find the same next token likeliest
perplexity  its change against float32
outliers    error of a layer's output whose inputs have a few channels that are 1, 30 and 100 times
            the others; over the output, and over what the ordinary channels contribute to it
keys        error of an attention's output where a few channels of the keys stand around 0, 30 and
            100 deviations in every token

The text is that of standard-library modules which the bundled model was never trained on."""

# The KV cache in each format alone, and in int8 under codes; without a word, KV is held in the
# dtype of the weights.
_KV_PAIRS = (
    FormatPair("fp32", "bf16"),
    FormatPair("fp32", "fp16"),
    FormatPair("fp32", "int8"),
    FormatPair("bf16", "int8"),
    FormatPair("int8", "int8"),
    FormatPair("int4", "int8"),
)
_BLOCK_BITS = (("Q8_0 (llama.cpp)", 8), ("Q4_0 (llama.cpp)", 4))


def add_accuracy(kinds: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(kinds, "accuracy", "What each format loses, beside float32.", _run)
    parser.description = _TEXT
    add_model(parser)
    parser.add_argument("--revision", help="hub revision (default: the default branch)")
    parser.add_argument("--offline", action="store_true", help="never touch the network")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="another text, in UTF-8, to measure on"
    )
    for name, default, what in (
        ("--tokens", 4096, "of the text, in windows at even distances"),
        ("--window", 512, "of a window, each computed from its start"),
    ):
        parser.add_argument(
            name,
            type=token_count,
            default=default,
            metavar="TOKENS",
            help=f"{what} (default: %(default)s)",
        )
    parser.add_argument(
        "--formats",
        nargs="+",
        metavar="FORMAT",
        choices=list(WEIGHT_FORMATS),
        help="only these weights (default: all that are offered)",
    )
    parser.add_argument(
        "--kv",
        nargs="+",
        metavar="FORMAT",
        choices=[name for name in KV_FORMATS if name != "auto"],
        help="only these KV formats (default: all that are offered)",
    )
    parser.add_argument("--threads", type=positive_int, metavar="N", help="CPU threads")
    parser.add_argument("--seed", type=int, default=0, help="draws the layers (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON")


class _Bench(msgspec.Struct, frozen=True):
    """What is measured, and with which ops."""

    args: argparse.Namespace
    checkpoint: Checkpoint
    spec: ModelSpec
    ops: OpTable

    def model(self, dtype: str, quantization: str | None = None, bits: int | None = None) -> Model:
        """The checkpoint in a format; `bits` takes llama.cpp's scheme."""
        from quickstep.bench.block_scheme import block_ops
        from quickstep.model.loader import load_model

        ops = self.ops if bits is None else block_ops(self.ops, bits, self.spec.vocab_size)
        load = LoadConfig(
            model=model_of(self.args), dtype=dtype, device="cpu", quantization=quantization
        )
        return load_model(self.checkpoint, self.spec, ops, load, None, self.args.window)

    def pairs(self) -> Iterator[FormatPair]:
        """What was asked for: weights with KV of their own dtype, then KV formats."""
        weights, kv = self.args.formats, self.args.kv
        for name in WEIGHT_FORMATS:
            if weights is None or name in weights:
                yield FormatPair(name, "auto")
        for pair in _KV_PAIRS:
            if (weights is None or pair.weights in weights) and (kv is None or pair.kv in kv):
                yield pair

    def of_pair(self, pair: FormatPair) -> Model:
        """The checkpoint in a pair's weights; codes run over the checkpoint's dtype."""
        return self.model(*WEIGHT_FORMATS[pair.weights])


def _run(args: argparse.Namespace) -> int:
    bench = _open(args)
    found = AccuracyReport(_asked(bench), _on_text(bench), _on_layers(bench), _on_keys(bench))
    if args.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print_accuracy(found)
    return 0


def _open(args: argparse.Namespace) -> _Bench:
    import os

    require_torch("quickstep bench accuracy")
    import torch

    from quickstep.engine.assembly import set_threads
    from quickstep.model.checkpoint.source import find_checkpoint
    from quickstep.model.spec import read_spec
    from quickstep.ops.resolve import resolve_ops

    set_threads(args.threads)
    load = LoadConfig(model=model_of(args), revision=args.revision, offline=args.offline)
    checkpoint = find_checkpoint(load)
    spec = read_spec(checkpoint.path)
    if not spec.native:
        raise ConfigError(
            f"{spec.architecture} runs through transformers, where weights stay as they are; "
            "bench accuracy needs a model of Quickstep's own"
        )
    if args.window > spec.max_model_len:
        raise ConfigError(f"--window is {args.window}, the model takes {spec.max_model_len} tokens")
    isa = os.environ.get("QUICKSTEP_CPU_ISA")
    ops = resolve_ops(torch.device("cpu"), num_threads=args.threads, isa=isa)
    return _Bench(args, checkpoint, spec, ops)


def _on_text(bench: _Bench) -> dict[str, TextAccuracy]:
    from quickstep.bench.held_out import held_out_text
    from quickstep.bench.text_accuracy import Reference, compare, cut_windows
    from quickstep.engine.text.tokenizer import Tokenizer

    args = bench.args
    text = held_out_text() if args.text is None else _read(args.text)
    token_ids = Tokenizer.open(bench.checkpoint.path).encode(text)
    windows = cut_windows(token_ids, args.tokens, args.window)
    reference = Reference.of(bench.model("float32"), windows)
    found = {
        _row_name(pair): compare(reference, bench.of_pair(pair), KV_FORMATS[pair.kv])
        for pair in bench.pairs()
    }
    for name, bits in _BLOCK_BITS:
        found[name] = compare(reference, bench.model("float32", bits=bits))
    return found


def _row_name(pair: FormatPair) -> str:
    return pair.weights if pair.kv == "auto" else f"{pair.weights}, KV {pair.kv}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read: {error}") from error


def _on_layers(bench: _Bench) -> dict[str, dict[int, LayerError]]:
    import torch

    from quickstep.bench.outlier_layers import FACTORS, block_error, format_error, random_layer
    from quickstep.model.quantization import SCHEMES

    layers = {factor: random_layer(factor, bench.args.seed) for factor in FACTORS}
    found: dict[str, dict[int, LayerError]] = {}
    for name, _ in (pair for pair in bench.pairs() if pair.kv == "auto"):
        weights = WEIGHT_FORMATS[name]
        if weights.quantization is None:
            dtype, form = getattr(torch, weights.dtype), None
        else:
            scheme = SCHEMES[weights.quantization]
            dtype, form = torch.float32, scheme.format_of(_layer_inputs(layers), outer=False)
        found[name] = {
            factor: format_error(layer, bench.ops, dtype, form) for factor, layer in layers.items()
        }
    for name, bits in _BLOCK_BITS:
        found[name] = {factor: block_error(layer, bits) for factor, layer in layers.items()}
    return found


def _layer_inputs(layers: Mapping[int, OutlierLayer]) -> int:
    return next(iter(layers.values())).weight.shape[1]


def _on_keys(bench: _Bench) -> dict[str, dict[int, float]]:
    import torch

    from quickstep.bench.outlier_keys import kv_error, random_keys
    from quickstep.bench.outlier_layers import FACTORS

    layers = {factor: random_keys(factor, bench.args.seed) for factor in FACTORS}
    asked = bench.args.kv
    return {
        name: {
            factor: kv_error(layer, bench.ops, getattr(torch, dtype))
            for factor, layer in layers.items()
        }
        for name, dtype in KV_FORMATS.items()
        if name != "auto" and (asked is None or name in asked)
    }


def _asked(bench: _Bench) -> dict[str, Any]:
    """What makes two runs comparable: the text is the interpreter's."""
    import platform

    args = bench.args
    return {
        "model": bench.checkpoint.name,
        "kernels": bench.ops.name,
        "tokens": args.tokens // args.window * args.window,
        "window": args.window,
        "text_from": str(args.text or f"standard library of Python {platform.python_version()}"),
        "seed": args.seed,
    }
