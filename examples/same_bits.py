"""Run a request at batch size 1, then in a batch: tokens and logprobs are equal, bit for bit.

Run: python examples/same_bits.py
"""

import argparse

from quickstep import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--model", default="demo", help="a Hugging Face id or a directory (default: demo)"
)
args = parser.parse_args()

prompt = "def fibonacci(n):"
params = SamplingParams(temperature=1.0, seed=11, max_tokens=40, logprobs=3)
others = [f"# example {number}\nimport " for number in range(15)]

with LLM(args.model) as llm:
    single = llm.generate([prompt], params)[0].outputs[0]
    batched = llm.generate([*others, prompt], params)[-1].outputs[0]

assert single.token_ids == batched.token_ids
assert single.logprobs == batched.logprobs
print(f"{len(single.token_ids)} tokens and their logprobs: equal at batch sizes 1 and 16")
