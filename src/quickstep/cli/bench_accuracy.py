"""`quickstep bench accuracy [MODEL]`: what each weight format costs, in numbers.

Prints two tables: every format on text beside float32, and on synthetic layers with outlier
channels; llama.cpp's Q8_0 and Q4_0 stand in both. docs/design/0005 says what followed from them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quickstep.cli.engine_flags import add_model, model_of
from quickstep.cli.parsing import Parser, command, positive_int, token_count
from quickstep.config import QUANTIZATIONS, LoadConfig
from quickstep.errors import ConfigError

if TYPE_CHECKING:
    from quickstep.bench.outlier_layers import LayerError
    from quickstep.bench.text_accuracy import TextAccuracy
    from quickstep.model.decoder_spec import ModelSpec
    from quickstep.model.interface import Model
    from quickstep.model.source import Checkpoint
    from quickstep.ops.table import OpTable

__all__ = ["add_accuracy"]

_TEXT = """\
Measure what weight formats lose, beside llama.cpp's Q8_0 and Q4_0 computed in NumPy.

kl          Kullback-Leibler divergence from float32, nats per token: mean, and 99th percentile
top-1       share of tokens at which both find the same next token likeliest
perplexity  its change against float32
outliers    error of a layer's output whose inputs have a few channels that are 1, 30 and 100 times
            the others; over the output, and over what the ordinary channels contribute to it

The text is that of standard-library modules which the bundled model was never trained on."""

# Not quantised: (name, dtype)
_DTYPES = (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"))
_BLOCK_BITS = (("Q8_0 (llama.cpp)", 8), ("Q4_0 (llama.cpp)", 4))


def add_accuracy(kinds: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(kinds, "accuracy", "What each weight format loses, beside float32.", _run)
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
        choices=[name for name, _ in _DTYPES] + list(QUANTIZATIONS),
        help="only these (default: all that are offered)",
    )
    parser.add_argument("--threads", type=positive_int, metavar="N", help="CPU threads")
    parser.add_argument("--seed", type=int, default=0, help="draws the layers (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON")


@dataclass(frozen=True, slots=True)
class _Bench:
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

    def formats(self) -> Iterator[tuple[str, Callable[[], Model]]]:
        """Names, and what loads each; quantised weights run over the checkpoint's dtype."""
        asked = self.args.formats
        for name, dtype in _DTYPES:
            if asked is None or name in asked:
                yield name, partial(self.model, dtype)
        for name in QUANTIZATIONS:
            if asked is None or name in asked:
                yield name, partial(self.model, "auto", name)
        for name, bits in _BLOCK_BITS:
            yield name, partial(self.model, "float32", bits=bits)


def _run(args: argparse.Namespace) -> int:
    bench = _open(args)
    on_text = _on_text(bench)
    on_layers = _on_layers(bench)
    if args.json:
        print(json.dumps(_as_json(bench, on_text, on_layers), indent=2))
    else:
        _print(bench, on_text, on_layers)
    return 0


def _open(args: argparse.Namespace) -> _Bench:
    import os

    import torch

    from quickstep.engine.assembly import set_threads
    from quickstep.model.source import find_checkpoint
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
    from quickstep.engine.tokenizer import Tokenizer

    args = bench.args
    text = held_out_text() if args.text is None else _read(args.text)
    token_ids = Tokenizer.open(bench.checkpoint.path).encode(text)
    windows = cut_windows(token_ids, args.tokens, args.window)
    reference = Reference.of(bench.model("float32"), windows)
    return {name: compare(reference, load()) for name, load in bench.formats()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read: {error}") from error


def _on_layers(bench: _Bench) -> dict[str, dict[int, LayerError]]:
    import torch

    from quickstep.bench.outlier_layers import FACTORS, block_error, draw_layer, format_error
    from quickstep.model.quantization import SCHEMES

    layers = {factor: draw_layer(factor, bench.args.seed) for factor in FACTORS}
    asked = bench.args.formats
    found: dict[str, dict[int, LayerError]] = {}
    for name, dtype in _DTYPES:
        if asked is None or name in asked:
            of_torch = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(
                dtype, torch.float16
            )
            found[name] = {
                factor: format_error(layer, bench.ops, of_torch, None)
                for factor, layer in layers.items()
            }
    for name in QUANTIZATIONS:
        if asked is None or name in asked:
            found[name] = {
                factor: format_error(
                    layer,
                    bench.ops,
                    torch.float32,
                    SCHEMES[name].format_of(layer.weight.shape[1], outer=False),
                )
                for factor, layer in layers.items()
            }
    for name, bits in _BLOCK_BITS:
        found[name] = {factor: block_error(layer, bits) for factor, layer in layers.items()}
    return found


def _as_json(
    bench: _Bench,
    on_text: dict[str, TextAccuracy],
    on_layers: dict[str, dict[int, LayerError]],
) -> dict[str, Any]:
    return {
        **_asked(bench),
        "text": {name: asdict(found) for name, found in on_text.items()},
        "outlier_layers": {
            name: {str(factor): asdict(error) for factor, error in errors.items()}
            for name, errors in on_layers.items()
        },
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


def _print(
    bench: _Bench,
    on_text: dict[str, TextAccuracy],
    on_layers: dict[str, dict[int, LayerError]],
) -> None:
    from quickstep.cli.screen import console_on, print_table

    console = console_on(sys.stdout)
    for name, value in _asked(bench).items():
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
        for name, one in on_text.items()
    ]
    print_table(console, "on text, beside float32", header, rows)
    console.print()
    factors = list(next(iter(on_layers.values())))
    titles = [f"x{factor} {kind}" for factor in factors for kind in ("output", "ordinary")]
    cells = [
        (name, *(f"{share:.3%}" for e in errors.values() for share in (e.output, e.ordinary)))
        for name, errors in on_layers.items()
    ]
    print_table(console, "error of layers with outlier channels", ("weights", *titles), cells)
