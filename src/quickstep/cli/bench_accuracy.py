"""`quickstep bench accuracy [MODEL]`: the error of each format of weights and of the KV cache.

Compares every format with float32 on a text, and on synthetic layers with outlier channels;
llama.cpp's Q8_0 and Q4_0 are measured as well. docs/design/0005 uses the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec.structs import asdict

from quickstep.cli.flags.engine import add_model, model_of
from quickstep.cli.flags.parsing import Parser, command, positive_int, token_count
from quickstep.cli.flags.quantization import KV_FORMATS, WEIGHT_FORMATS, FormatPair
from quickstep.cli.screen import console_on, counting_bar, print_table
from quickstep.config import LoadConfig
from quickstep.errors import ConfigError
from quickstep.ops.torch_import import require_torch

if TYPE_CHECKING:
    from quickstep.bench.outliers import LayerError, OutlierLayer
    from quickstep.bench.text_accuracy import TextAccuracy
    from quickstep.model.checkpoint.source import Checkpoint
    from quickstep.model.decoder_spec import ModelSpec
    from quickstep.model.interface import Model
    from quickstep.ops.table import OpTable

_TEXT = """\
Measure the error of each format of weights and of the KV cache. llama.cpp's Q8_0 and Q4_0,
computed in NumPy, are included for comparison.

kl          Kullback-Leibler divergence from float32, nats per token: mean, and 99th percentile
top-1       fraction of tokens where both have the same most likely next token
perplexity  its change against float32
outliers    relative error of a linear layer's output when a few input channels are 1, 30 and 100
            times the others: relative to the output, and to the ordinary channels' part of it
keys        relative error of attention's output when a few key channels have a mean of 0, 30 and
            100 standard deviations

The default text is standard-library modules that the bundled model was not trained on."""

# Each KV format with float32 weights, int8 KV with each kind of weights, and int4 KV with quantized
# ones. All other rows keep KV in the dtype of the weights.
_KV_PAIRS = (
    FormatPair("fp32", "bf16"),
    FormatPair("fp32", "fp16"),
    FormatPair("fp32", "int8"),
    FormatPair("fp32", "int4"),
    FormatPair("fp32", "fp8"),
    FormatPair("bf16", "int8"),
    FormatPair("int8", "int8"),
    FormatPair("int4", "int8"),
    FormatPair("int8", "int4"),
    FormatPair("int4", "int4"),
)
_BLOCK_BITS = (("Q8_0 (llama.cpp)", 8), ("Q4_0 (llama.cpp)", 4))


def add_accuracy(kinds: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(
        kinds, "accuracy", "Error of each weight and KV format, compared with float32.", _run
    )
    parser.description = _TEXT
    add_model(parser)
    parser.add_argument("--revision", help="hub revision (default: the default branch)")
    parser.add_argument("--offline", action="store_true", help="never use the network")
    parser.add_argument("--text", type=Path, metavar="FILE", help="measure on this UTF-8 text")
    for name, default, what in (
        ("--tokens", 4096, "tokens of the text to use, in windows at even distances"),
        ("--window", 512, "tokens of a window; each window is one prefill"),
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
        help="only these weight formats (default: all)",
    )
    parser.add_argument(
        "--kv",
        nargs="+",
        metavar="FORMAT",
        choices=[name for name in KV_FORMATS if name != "auto"],
        help="only these KV formats (default: all)",
    )
    parser.add_argument("--threads", type=positive_int, metavar="N", help="CPU threads")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the synthetic layers (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


class _Report(NamedTuple):
    """Results by format; those of layers and keys also by the factor of their outlier channels."""

    settings: dict[str, Any]
    on_text: dict[str, TextAccuracy]
    on_layers: dict[str, dict[int, LayerError]]
    on_keys: dict[str, dict[int, float]]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            **self.settings,
            "text": {name: asdict(accuracy) for name, accuracy in self.on_text.items()},
            "outlier_layers": {
                name: {str(factor): asdict(error) for factor, error in errors.items()}
                for name, errors in self.on_layers.items()
            },
            "outlier_keys": {
                name: {str(factor): error for factor, error in errors.items()}
                for name, errors in self.on_keys.items()
            },
        }


class _Bench(msgspec.Struct, frozen=True):
    """The checkpoint to measure, and the ops to measure it with."""

    args: argparse.Namespace
    checkpoint: Checkpoint
    spec: ModelSpec
    ops: OpTable

    def model(self, dtype: str, quantization: str | None = None, bits: int | None = None) -> Model:
        """Load the checkpoint in a format; `bits` chooses llama.cpp's Q8_0 (8) or Q4_0 (4)."""
        from quickstep.bench.llama_cpp_formats import block_ops
        from quickstep.model.loader import load_model

        ops = self.ops if bits is None else block_ops(self.ops, bits, self.spec.vocab_size)
        load = LoadConfig(
            model=model_of(self.args), dtype=dtype, device="cpu", quantization=quantization
        )
        return load_model(self.checkpoint, self.spec, ops, load, None, self.args.window)

    def pairs(self) -> Iterator[FormatPair]:
        """The selected pairs: weights with KV of their own dtype, then the KV formats."""
        weights, kv = self.args.formats, self.args.kv
        for name in WEIGHT_FORMATS:
            if weights is None or name in weights:
                yield FormatPair(name, "auto")
        for pair in _KV_PAIRS:
            if (weights is None or pair.weights in weights) and (kv is None or pair.kv in kv):
                yield pair

    def of_pair(self, pair: FormatPair) -> Model:
        """Load the checkpoint with a pair's weights; quantized ones keep the checkpoint's dtype."""
        return self.model(*WEIGHT_FORMATS[pair.weights])


def _run(args: argparse.Namespace) -> int:
    bench = _open(args)
    report = _Report(_settings(bench), _on_text(bench), _on_layers(bench), _on_keys(bench))
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        _print_report(report)
    return 0


def _open(args: argparse.Namespace) -> _Bench:
    import os

    require_torch("quickstep bench accuracy")
    import torch

    from quickstep.engine.assembly import set_threads
    from quickstep.model.checkpoint.source import find_checkpoint
    from quickstep.model.spec import read_spec
    from quickstep.ops.resolve import resolve_ops

    load = LoadConfig(
        model=model_of(args),
        revision=args.revision,
        offline=args.offline,
        num_threads=args.threads,
    )
    set_threads(load.num_threads)
    checkpoint = find_checkpoint(load)
    spec = read_spec(checkpoint.path)
    if not spec.native:
        raise ConfigError(
            f"{spec.architecture} runs through transformers, which does not quantize; bench "
            "accuracy needs an architecture that Quickstep supports itself"
        )
    if args.window > spec.max_model_len:
        raise ConfigError(
            f"--window is {args.window}, the model's maximum is {spec.max_model_len} tokens"
        )
    isa = os.environ.get("QUICKSTEP_CPU_ISA")
    ops = resolve_ops(torch.device("cpu"), num_threads=args.threads, isa=isa)
    return _Bench(args, checkpoint, spec, ops)


def _on_text(bench: _Bench) -> dict[str, TextAccuracy]:
    from quickstep.bench.text_accuracy import Reference, compare, cut_windows, held_out_text
    from quickstep.text.tokenizer import Tokenizer

    args = bench.args
    text = held_out_text() if args.text is None else _read(args.text)
    token_ids = Tokenizer.open(bench.checkpoint.path).encode(text)
    windows = cut_windows(token_ids, args.tokens, args.window)
    pairs = list(bench.pairs())
    results: dict[str, TextAccuracy] = {}
    with counting_bar() as show:

        def begin(what: str) -> None:
            if show is not None:
                show(what, len(results), len(pairs) + len(_BLOCK_BITS))

        begin("float32")
        reference = Reference.of(bench.model("float32"), windows)
        for pair in pairs:
            name = _row_name(pair)
            begin(name)
            results[name] = compare(reference, bench.of_pair(pair), KV_FORMATS[pair.kv])
        for name, bits in _BLOCK_BITS:
            begin(name)
            results[name] = compare(reference, bench.model("float32", bits=bits))
    return results


def _row_name(pair: FormatPair) -> str:
    return pair.weights if pair.kv == "auto" else f"{pair.weights}, KV {pair.kv}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read: {error}") from error


def _on_layers(bench: _Bench) -> dict[str, dict[int, LayerError]]:
    import torch

    from quickstep.bench.outliers import FACTORS, block_error, format_error, random_layer
    from quickstep.model.quantization import SCHEMES

    layers = {factor: random_layer(factor, bench.args.seed) for factor in FACTORS}
    errors: dict[str, dict[int, LayerError]] = {}
    for name, _ in (pair for pair in bench.pairs() if pair.kv == "auto"):
        weights = WEIGHT_FORMATS[name]
        if weights.quantization is None:
            dtype, form = getattr(torch, weights.dtype), None
        else:
            scheme = SCHEMES[weights.quantization]
            dtype, form = torch.float32, scheme.format_of(_layer_inputs(layers), outer=False)
        errors[name] = {
            factor: format_error(layer, bench.ops, dtype, form) for factor, layer in layers.items()
        }
    for name, bits in _BLOCK_BITS:
        errors[name] = {factor: block_error(layer, bits) for factor, layer in layers.items()}
    return errors


def _layer_inputs(layers: Mapping[int, OutlierLayer]) -> int:
    return next(iter(layers.values())).weight.shape[1]


def _on_keys(bench: _Bench) -> dict[str, dict[int, float]]:
    from quickstep.bench.outliers import FACTORS, kv_error, random_keys
    from quickstep.ops.tensors import find_dtype, torch_dtype

    layers = {factor: random_keys(factor, bench.args.seed) for factor in FACTORS}
    selected = bench.args.kv
    return {
        name: {
            factor: kv_error(layer, bench.ops, torch_dtype(find_dtype(dtype)))
            for factor, layer in layers.items()
        }
        for name, dtype in KV_FORMATS.items()
        if name != "auto" and (selected is None or name in selected)
    }


def _settings(bench: _Bench) -> dict[str, Any]:
    """What must be equal for two runs to be comparable; the default text depends on the Python."""
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


def _print_report(report: _Report) -> None:
    """Print three tables: text, outlier layers, outlier keys."""
    console = console_on(sys.stdout)
    for name, value in report.settings.items():
        console.print(f"{name.replace('_', ' ')}: {value}", markup=False)
    console.print()
    header = ("weights", "KL mean, nats", "KL p99", "top-1", "perplexity", "change")
    rows = [
        (
            name,
            f"{one.kl_mean:.5f}",
            f"{one.kl_p99:.4f}",
            f"{one.top1_agreement:.2%}",
            f"{one.perplexity:.3f}",
            f"{one.perplexity_change:+.2%}",
        )
        for name, one in report.on_text.items()
    ]
    print_table(console, "on text, compared with float32", header, rows)
    console.print()
    factors = list(next(iter(report.on_layers.values())))
    titles = [f"x{factor} {kind}" for factor in factors for kind in ("output", "ordinary")]
    cells = [
        (name, *(f"{error:.3%}" for e in errors.values() for error in (e.output, e.ordinary)))
        for name, errors in report.on_layers.items()
    ]
    print_table(
        console, "error of linear layers with outlier channels", ("weights", *titles), cells
    )
    console.print()
    offsets = [f"x{factor}" for factor in next(iter(report.on_keys.values()))]
    cells = [
        (name, *(f"{error:.3%}" for error in errors.values()))
        for name, errors in report.on_keys.items()
    ]
    print_table(console, "error of attention with outlier keys", ("KV", *offsets), cells)
