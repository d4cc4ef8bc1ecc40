"""256 requests at once in a KV pool of 1.2 times the largest: the bits of an idle engine."""

from __future__ import annotations

from random import Random

import pytest
from tiny_checkpoint import write_checkpoint

from quickstep import LLM, SamplingParams
from quickstep.types import Grammar

NUM_REQUESTS = 256
BLOCK_SIZE = 4
LARGEST = 48  # tokens of the largest request, with its outputs
NUM_BLOCKS = round(1.2 * LARGEST / BLOCK_SIZE)
GRAMMARS = [
    Grammar.of_regex("[a-z]{8,16}[0-9]"),
    Grammar.of_choice(["a longer answer", "a longer one", "no"]),
    Grammar.of_json_schema({"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 9}),
]


def prompt_of(number):
    """All prompts begin alike, so that some of them share blocks; the first one is the largest."""
    length = 24 if number == 0 else Random(number).randint(4, 24)
    return f"shared {number:03} {'prompt ' * 6}"[:length]


def sampling_of(number):
    """Greedy and sampled; every fifth with a grammar, others with penalties."""
    rng = Random(number)
    has_grammar = number % 5 == 1
    return SamplingParams(
        temperature=(0.0, 0.7, 1.5)[number % 3],
        seed=number,
        max_tokens=LARGEST - 24 if number == 0 else rng.randint(4, 20),
        ignore_eos=not has_grammar,
        grammar=GRAMMARS[number % 3] if has_grammar else None,
        repetition_penalty=1.3 if number % 4 == 0 else 1.0,
        presence_penalty=0.8 if number % 4 == 2 else 0.0,
        frequency_penalty=0.5 if number % 8 == 3 else 0.0,
        logprobs=2 if number % 7 == 0 else None,
    )


PROMPTS = [prompt_of(number) for number in range(NUM_REQUESTS)]
SAMPLING = [sampling_of(number) for number in range(NUM_REQUESTS)]


def content(outputs):
    """What a client gets, which may not depend on the load."""
    return [
        (output.outputs[0].token_ids, output.outputs[0].logprobs, output.outputs[0].ended_by)
        for output in outputs
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("small-pool") / "tiny-llama")


@pytest.fixture(scope="module")
def unloaded(checkpoint):
    """Each request by itself, with memory for all of them."""
    with LLM(str(checkpoint), num_threads=1, seed=0, block_size=BLOCK_SIZE) as llm:
        alone = [llm.generate(*one)[0] for one in zip(PROMPTS, SAMPLING, strict=True)]
        assert llm.engine.stats().scheduler.totals.num_preemptions == 0
    return content(alone)


@pytest.mark.parametrize(
    ("policy", "depth", "prefix_caching"), [("mixed", 2, True), ("deadline", 1, False)]
)
def test_preempted_requests_end_with_the_bits_of_an_idle_engine(
    checkpoint, unloaded, policy, depth, prefix_caching
):
    llm = LLM(
        str(checkpoint),
        num_threads=1,
        seed=0,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=NUM_REQUESTS,
        policy=policy,
        pipeline_depth=depth,
        enable_prefix_caching=prefix_caching,
    )
    with llm:
        outputs = llm.generate(PROMPTS, SAMPLING)
        stats = llm.engine.stats().scheduler
    assert content(outputs) == unloaded
    preemptions = [output.metrics.sequences[0].num_preemptions for output in outputs]
    # Two sequences that evict each other in turn would be preempted every few steps.
    assert 0 < sum(preemptions) == stats.totals.num_preemptions < NUM_REQUESTS
    assert max(preemptions) <= 4
    assert (stats.num_running, stats.num_waiting, stats.blocks.num_used) == (0, 0, 0)
