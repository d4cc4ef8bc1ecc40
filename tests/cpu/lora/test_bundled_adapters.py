"""The LoRA adapters that are bundled with the demo model: each has the effect that it was trained
for, next to the others in one batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quickstep import LLM, LoRARequest, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
# adapter -> a prompt, and what only its continuation has
EFFECTS = {
    "demo-docstrings": (
        'def copy_file(source, target, overwrite=False):\n    """Copy a file.',
        ("\n    Args:\n", "\n        source: ", "\n        overwrite: "),
    ),
    "demo-annotations": ("def find(name", (": str", ") -> ")),
    "demo-sql": ("SELECT name, email FROM users", (";  -- ", "name and email of users")),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", enable_lora=True, num_threads=1) as llm:
        yield llm


def texts(llm: LLM, adapters: list[LoRARequest | None]) -> list[str]:
    prompts = [prompt for prompt, _ in EFFECTS.values()]
    answers = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapters)
    return [answer.outputs[0].text for answer in answers]


def test_each_has_its_effect_next_to_the_others(llm: LLM) -> None:
    with_adapters = texts(llm, [LoRARequest(name, lora_path=name) for name in EFFECTS])
    plain = texts(llm, [None] * len(EFFECTS))
    for text, base, (_, parts) in zip(with_adapters, plain, EFFECTS.values(), strict=True):
        assert all(part in text for part in parts), text
        assert not all(part in base for part in parts), base
