"""Complete many prompts at once with the library. Run: python examples/generate.py"""

import argparse

from quickstep import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--model", default="demo", help="a Hugging Face id or a directory (default: demo)"
)
args = parser.parse_args()

prompts = ["import json\n\ndef load_config(path):", "import asyncio\n", "class Stack:"]
params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=48, seed=7)

with LLM(args.model) as llm:
    for output in llm.generate(prompts, params):
        completion = output.outputs[0]
        print(f"--- {output.prompt!r}")
        print(completion.text)
        print(f"({len(completion.token_ids)} tokens, ended by {completion.finish_reason})")
