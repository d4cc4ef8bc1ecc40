"""What the bundled model answers in some formats, down to the bits. Imports no torch by itself."""

from __future__ import annotations

from quickstep import LLM, SamplingParams
from quickstep.types import Pooling

# weights, KV cache
FORMATS = ((None, "auto"), (None, "int8"), ("int8", "auto"), ("int4", "int8"))

_PROMPTS = ["def add(first, second):\n    return", "import os\n" * 30, "a"]
_SAMPLING = [
    SamplingParams(temperature=temperature, seed=3, max_tokens=12, logprobs=2, prompt_logprobs=1)
    for temperature in (0.0, 1.0, 0.7)
]


def answers(quantization: str | None, kv_dtype: str, enforce_eager: bool = False) -> list[str]:
    """Tokens, logprobs, scores of the prompt, embeddings and the fingerprint, as text."""
    engine = LLM(
        "demo",
        quantization=quantization,
        kv_cache_dtype=kv_dtype,
        enforce_eager=enforce_eager,
        device="cpu",
        num_blocks=64,
    )
    try:
        outputs = engine.generate(_PROMPTS, _SAMPLING, use_tqdm=False)
        found = [
            repr((output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs))
            for output in outputs
        ]
        for pooling in (Pooling.LAST, Pooling.MEAN, Pooling.CLS):
            embedded = engine.embed(_PROMPTS, use_tqdm=False, pooling=pooling)
            found += [repr(tuple(one.outputs.embedding)) for one in embedded]
        return [*found, engine.engine.fingerprint]
    finally:
        engine.close()
