"""Tokens per step of the model with chains and with trees of drafts.

    python -m benchmarks.speculation_trees [--model demo] [--drafts demo-eagle demo-medusa]
                                           [--sizes 4 8 16] [--widths 1 2 4 8] [--tokens 96]

The prompts are code, and every row has as many drafts as are allowed (in an engine, only those that
pay), so the figures do not depend on the machine or its load. The tokens have to be equal with all
widths; width 1 is a chain.
"""

from __future__ import annotations

import argparse

from benchmarks.machine import describe_machine
from benchmarks.speculation import Prompts, method_of
from quickstep import LLM, SamplingParams
from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.core.drafts.control import DraftControl

_NUM_PROMPTS = 8
_TEMPERATURES = (0.0, 0.8)


class AllDrafts(DraftControl):
    """Every draft pays, whatever it costs."""

    def planned(self, decode: StepLoad, cost_model: CostModel) -> None:
        """The price stays 0."""

    def measured(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Steps with drafts are not compared with those without."""


def run(
    model: str, drafts: str, width: int, size: int, temperature: float, num_tokens: int
) -> tuple[list[tuple[int, ...]], float, float]:
    """The tokens of all prompts, tokens per step of a sequence, and drafts per step."""
    config = {
        "method": method_of(drafts),
        "model": drafts,
        "tree_width": width,
        "num_speculative_tokens": size,
    }
    source = Prompts()
    prompts = [source.of("code", index) for index in range(_NUM_PROMPTS)]
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=num_tokens, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    with LLM(model, speculative_config=config, max_num_seqs=_NUM_PROMPTS) as llm:
        # no setting does this: an engine drafts what pays
        llm.engine._scheduler._drafts = AllDrafts(size)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    timings = [sequence for output in outputs for sequence in output.metrics.sequences if sequence]
    total = sum(timing.num_output_tokens for timing in timings)
    steps = total - sum(timing.num_accepted for timing in timings)
    num_drafts = sum(timing.num_drafts for timing in timings)
    return (
        [tuple(output.outputs[0].token_ids) for output in outputs],
        total / steps,
        num_drafts / steps,
    )


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafts", nargs="+", default=["demo-eagle", "demo-medusa"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    print(describe_machine())
    print(f"{'drafts':<12}{'T':>5}{'at most':>9}{'width':>7}{'tokens/step':>13}{'drafts/step':>13}")
    for drafts in args.drafts:
        for temperature in _TEMPERATURES:
            for size in args.sizes:
                expected = None
                for width in args.widths:
                    tokens, per_step, num_drafts = run(
                        args.model, drafts, width, size, temperature, args.tokens
                    )
                    expected = expected or tokens
                    assert tokens == expected, f"{drafts}, width {width}: other tokens"
                    print(
                        f"{drafts:<12}{temperature:>5.1f}{size:>9}{width:>7}{per_step:>13.2f}"
                        f"{num_drafts:>13.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
