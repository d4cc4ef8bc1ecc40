"""`python -m benchmarks [--device cuda] [--model demo] [--repeats 5]`: what `make bench` runs."""

from __future__ import annotations

import argparse

from benchmarks import bench_engine
from benchmarks.machine import describe_machine


def main() -> None:
    """Parse, describe the machine, measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--model", default="demo", help="a directory, a hub id, or demo")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--repeats", type=int, default=5, help="measured rounds (one more warms up)"
    )
    args = parser.parse_args()
    print(describe_machine())
    bench_engine.run(args.model, args.device, args.repeats)


if __name__ == "__main__":
    main()
