"""Published trace formats become arrivals; a bad line is one sentence with its number."""

from __future__ import annotations

import pytest

from quickstep.errors import ConfigError
from quickstep.sim.traces import read_trace

MOONCAKE = [
    '{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [3, 4, 5]}',
    '{"timestamp": 3500, "input_length": 1200, "output_length": 7, "hash_ids": [3, 4, 9]}',
]
AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:17:03.9799600,4808,10",
    "2023-11-16 18:17:04.9799600,3180,8",
]
BURST_GPT = [
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "5,ChatGPT,472,18,490,Conversation log",
    "45,ChatGPT,1087,0,1087,Conversation log",
    "118,GPT-4,417,276,693,Conversation log",
]


def test_mooncake_prompts_share_the_blocks_of_equal_hashes() -> None:
    first, second = read_trace(MOONCAKE)
    assert (first.at_s, second.at_s) == (0.0, 2.5)
    one, two = first.request.prompt_token_ids, second.request.prompt_token_ids
    assert (len(one), len(two)) == (1100, 1200)
    assert one[:1024] == two[:1024]
    assert not set(one[1024:]) & set(two[1024:])
    assert second.request.sampling.max_tokens == 7


def test_azure_and_burst_gpt_have_times_and_lengths() -> None:
    first, second = read_trace(AZURE)
    assert second.at_s - first.at_s == pytest.approx(1.0)
    assert len(first.request.prompt_token_ids) == 4808
    answered = read_trace(BURST_GPT, speed=2.0)
    assert [one.at_s for one in answered] == [0.0, 56.5]
    assert [one.request.sampling.max_tokens for one in answered] == [18, 276]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([*MOONCAKE * 8, '{"timestamp": 1'], "line 17 of the trace is not valid"),
        ([*AZURE, "2023-11-16 18:17:04,x,8"], "line 4 of the trace is not valid"),
        ([*BURST_GPT, "1,GPT-4,-5,3,0,x"], "line 5 of the trace is not valid: a length is below 0"),
        (["a,b", "1,2"], "the trace is neither JSON lines as Mooncake's, nor a CSV file"),
        (AZURE[:1], "the trace has no requests"),
        ([], "the trace is neither"),
    ],
)
def test_a_bad_trace_is_one_sentence(lines: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_trace(lines)
