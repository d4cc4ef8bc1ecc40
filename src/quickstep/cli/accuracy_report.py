"""What `quickstep bench accuracy` prints: its figures as tables or as JSON."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import asdict

if TYPE_CHECKING:
    from quickstep.bench.outlier_layers import LayerError
    from quickstep.bench.text_accuracy import TextAccuracy

__all__ = ["AccuracyReport", "print_accuracy"]


class AccuracyReport(NamedTuple):
    """By format; of layers and keys, by how far their large channels stand out."""

    asked: dict[str, Any]
    on_text: dict[str, TextAccuracy]
    on_layers: dict[str, dict[int, LayerError]]
    on_keys: dict[str, dict[int, float]]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            **self.asked,
            "text": {name: asdict(found) for name, found in self.on_text.items()},
            "outlier_layers": {
                name: {str(factor): asdict(error) for factor, error in errors.items()}
                for name, errors in self.on_layers.items()
            },
            "outlier_keys": {
                name: {str(factor): error for factor, error in errors.items()}
                for name, errors in self.on_keys.items()
            },
        }


def print_accuracy(report: AccuracyReport) -> None:
    """Three tables."""
    from quickstep.cli.screen import console_on, print_table

    console = console_on(sys.stdout)
    for name, value in report.asked.items():
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
    print_table(console, "on text, beside float32", header, rows)
    console.print()
    factors = list(next(iter(report.on_layers.values())))
    titles = [f"x{factor} {kind}" for factor in factors for kind in ("output", "ordinary")]
    cells = [
        (name, *(f"{share:.3%}" for e in errors.values() for share in (e.output, e.ordinary)))
        for name, errors in report.on_layers.items()
    ]
    print_table(console, "error of layers with outlier channels", ("weights", *titles), cells)
    console.print()
    offsets = [f"x{factor}" for factor in next(iter(report.on_keys.values()))]
    shares = [
        (name, *(f"{share:.3%}" for share in errors.values()))
        for name, errors in report.on_keys.items()
    ]
    print_table(console, "error of attention over outlier keys", ("KV", *offsets), shares)
