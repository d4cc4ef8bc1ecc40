"""Generate JSON that conforms to a schema. Run: python examples/structured.py"""

import argparse
import json

from quickstep import LLM, SamplingParams
from quickstep.types import Grammar

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--model", default="demo", help="a Hugging Face id or a directory (default: demo)"
)
args = parser.parse_args()

schema = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
messages = [{"role": "user", "content": "Reply in JSON. Ann is 41 years old."}]

with LLM(args.model) as llm:
    for seed in range(3):
        params = SamplingParams(
            temperature=1.5, seed=seed, max_tokens=64, grammar=Grammar.of_json_schema(schema)
        )
        person = json.loads(llm.chat(messages, params)[0].outputs[0].text)
        print(person["name"], person["age"])
