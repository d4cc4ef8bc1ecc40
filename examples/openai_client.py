"""Use a running server with OpenAI's client: chat, a stream, a tool call.

Run: quickstep serve & python examples/openai_client.py
"""

import argparse
import json

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
client = OpenAI(base_url=parser.parse_args().url, api_key="unused")
model = client.models.list().data[0].id

question = {"role": "user", "content": "What does itertools.chain do?"}
answer = client.chat.completions.create(model=model, messages=[question], temperature=0)
print(answer.choices[0].message.content)

for chunk in client.chat.completions.create(model=model, messages=[question], stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

tool = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the weather in Bern?"}],
    tools=[tool],
    tool_choice="required",
    temperature=0,
)
call = answer.choices[0].message.tool_calls[0].function
print(call.name, json.loads(call.arguments))
