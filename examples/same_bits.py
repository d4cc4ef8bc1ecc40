"""Run a request alone, then among others: tokens and logprobs are the same to the bit.

Run: python examples/same_bits.py
"""

import argparse

from quickstep import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="demo", help="a hub id or a directory (default: bundled)")
args = parser.parse_args()

prompt = "def fibonacci(n):"
params = SamplingParams(temperature=1.0, seed=11, max_tokens=40, logprobs=3)
others = [f"# example {number}\nimport " for number in range(15)]

with LLM(args.model) as llm:
    alone = llm.generate([prompt], params)[0].outputs[0]
    among = llm.generate([*others, prompt], params)[-1].outputs[0]

assert alone.token_ids == among.token_ids
assert alone.logprobs == among.logprobs
print(f"{len(alone.token_ids)} tokens and their logprobs: equal alone and in a batch of 16")
