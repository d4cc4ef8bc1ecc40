"""`python -m benchmarks [--device cuda] [--model demo]`: what `make bench` runs.

Runs the benchmarks of the command line one after another, on one model and on the smallest shape.
"""

from __future__ import annotations

import argparse
import sys

from quickstep.cli.main import main as quickstep


def main() -> int:
    """Run every benchmark until one fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--model", default="demo", help="a directory, a Hugging Face id, or demo")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--repeats", default="5", help="measured rounds")
    args = parser.parse_args()
    flags = ["--device", args.device, "--repeats", args.repeats]
    benches = (
        ["step", "--shape", "tiny2"],
        ["step", args.model],
        ["step", args.model, "--batch", "32"],
        ["latency", args.model, "--output-len", "64"],
        ["throughput", args.model, "--max-len", "512"],
    )
    for bench in benches:
        print(f"--- quickstep bench {' '.join(bench + flags)}", flush=True)
        code = quickstep(["bench", *bench, *flags])
        if code:
            return code
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
