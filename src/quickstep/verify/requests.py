"""Random requests for the exactness checker: narrow where batching has edges.

Prompt lengths sit at and around block edges, prompts share prefixes, seeds, penalties and filters
vary, some outputs follow a grammar, and every request asks for logprobs, because their bits show
what token ids hide. A function of the seed alone. Called by `verify.checker`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import MappingProxyType

from quickstep.dataclass import dataclass
from quickstep.sampling_params import ReasoningTokens, TokenForms
from quickstep.types import Grammar, Pooling, Request, SamplingParams

__all__ = ["LONG_OUTPUTS", "MAX_OUTPUTS", "MAX_PROMPT_LEN", "Vocabulary", "draw_requests"]

MAX_PROMPT_LEN = 80
MAX_OUTPUTS = 64
# Some grow by several blocks: only those can starve a pool that has admitted them.
LONG_OUTPUTS = 40
_NUM_DOCUMENTS = 4
# Two in sixteen requests ask for an embedding.
_POOLINGS = MappingProxyType({7: Pooling.MEAN, 11: Pooling.LAST})
_GRAMMARS = (
    Grammar.of_json_object(),
    Grammar.of_json_schema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 5},
            },
            "required": ["name", "sizes"],
            "additionalProperties": False,
        }
    ),
    Grammar.of_json_schema({"type": "array", "items": {"type": "number"}, "minItems": 2}),
    Grammar.of_json_schema(
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "number"}, "minItems": 1},
            "minItems": 2,
        }
    ),
    Grammar.of_json_schema(
        {
            "oneOf": [
                {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]{1,3}$"},
                {"type": "integer", "minimum": -7, "maximum": 4096},
                {
                    "type": "object",
                    "required": ["x", "y"],
                    "additionalProperties": {"type": ["number", "null"]},
                },
            ]
        }
    ),
    Grammar.of_regex("[a-z ]{3,30}[0-9.]"),
    Grammar.of_choice(["yes", "no", "it depends on the weather"]),
    Grammar.of_lark('start: "(" (start | WORD | NUMBER)* ")"\nWORD: /[a-z]+ /\nNUMBER: /[0-9.]+;/'),
    Grammar.of_gbnf('root ::= line{1,4}\nline ::= [a-z]+ "=" [0-9]{1,3} "\\n"\n'),
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids that requests may name, those that end a sequence, and whether there is somebody
    who compiles grammars.
    """

    size: int
    eos_token_ids: frozenset[int] = frozenset()
    has_grammars: bool = False


def draw_requests(
    count: int, seed: int, vocabulary: Vocabulary, block_size: int, max_model_len: int
) -> list[Request]:
    """`count` requests with ids `r0`, `r1`, ...; no prompt fills `max_model_len`."""
    draws = random.Random(f"requests {seed}")
    longest = min(MAX_PROMPT_LEN, max_model_len - 1)
    documents = [
        [draws.randrange(vocabulary.size) for _ in range(longest)] for _ in range(_NUM_DOCUMENTS)
    ]
    return [
        Request(
            request_id=f"r{index}",
            prompt_token_ids=_prompt(draws, documents, vocabulary.size, block_size),
            sampling=_with_features(
                draws,
                _sampling(draws, vocabulary.size, is_long=index < 5 or index % 32 == 0),
                documents,
                vocabulary,
            ),
            seed=draws.getrandbits(64),
            eos_token_ids=vocabulary.eos_token_ids,
            priority=draws.choice((0, 0, 0, 1)),
            pooling=_POOLINGS.get(index % 16),
        )
        for index in range(count)
    ]


def _prompt(
    draws: random.Random, documents: list[list[int]], vocab_size: int, block_size: int
) -> tuple[int, ...]:
    document = draws.choice(documents)
    length = _length(draws, len(document), block_size)
    if draws.random() < 0.7:
        num_shared = min(length, _length(draws, len(document), block_size))
    else:
        num_shared = 0
    tail = [draws.randrange(vocab_size) for _ in range(length - num_shared)]
    return (*document[:num_shared], *tail)


def _length(draws: random.Random, longest: int, block_size: int) -> int:
    """Half at block edges and one beside them, half anywhere."""
    if draws.random() < 0.5:
        edge = block_size * draws.randint(1, max(1, longest // block_size))
        length = edge + draws.choice((-1, 0, 1))
    else:
        length = draws.randint(1, longest)
    return min(max(length, 1), longest)


def _sampling(draws: random.Random, vocab_size: int, is_long: bool) -> SamplingParams:
    def sometimes(share: float, value: float, otherwise: float) -> float:
        return value if draws.random() < share else otherwise

    max_tokens = draws.randint(LONG_OUTPUTS, MAX_OUTPUTS) if is_long else draws.randint(3, 7)
    penalised = 0.5 if is_long else 0.15
    is_biased = draws.random() < 0.1
    has_stops = draws.random() < 0.1
    return SamplingParams(
        n=2 if draws.random() < 0.05 else 1,
        temperature=draws.choice((0.0, 0.8)),
        top_p=sometimes(0.3, 0.9, 1.0),
        top_k=20 if draws.random() < 0.2 else 0,
        min_p=sometimes(0.1, 0.05, 0.0),
        presence_penalty=sometimes(penalised, 1.5, 0.0),
        frequency_penalty=sometimes(penalised, 1.0, 0.0),
        repetition_penalty=sometimes(penalised, 1.2, 1.0),
        logit_bias={draws.randrange(vocab_size): 3.0 for _ in range(3)} if is_biased else {},
        max_tokens=max_tokens,
        min_tokens=draws.randint(1, 3) if draws.random() < 0.2 else 0,
        stop_token_ids=tuple(draws.sample(range(vocab_size), min(20, vocab_size // 4)))
        if has_stops
        else (),
        ignore_eos=draws.random() < 0.5,
        logprobs=draws.choice((0, 0, 3)),
        prompt_logprobs=draws.choice((0, 2)) if draws.random() < 0.15 else None,
    )


def _with_features(
    draws: random.Random,
    sampling: SamplingParams,
    documents: list[list[int]],
    vocabulary: Vocabulary,
) -> SamplingParams:
    """About half of the requests as they are, the others with one to three of what has a state, or
    draws, of its own.
    """
    if draws.random() < 0.5:
        return sampling
    names = ["typical", "xtc", "dry", "bad words", "thinking"]
    names += ["grammar"] * vocabulary.has_grammars
    chosen = draws.sample(names, draws.randint(1, 3))
    follows_grammar = "grammar" in chosen
    words = tuple(
        tuple(draws.choices(draws.choice(documents), k=draws.randint(1, 2))) for _ in range(8)
    )
    thinks = "thinking" in chosen
    return replace(
        sampling,
        temperature=0.8 if {"typical", "xtc"} & set(chosen) else sampling.temperature,
        typical_p=0.8 if "typical" in chosen else 1.0,
        xtc_probability=0.5 if "xtc" in chosen else 0.0,
        dry_multiplier=0.8 if "dry" in chosen else 0.0,
        dry_allowed_length=draws.choice((1, 2)),
        dry_range=draws.choice((0, 20)),
        thinking_budget=draws.randint(0, 6) if thinks else None,
        grammar=draws.choice(_GRAMMARS) if follows_grammar else None,
        ignore_eos=sampling.ignore_eos and not follows_grammar,
        in_tokens=TokenForms(
            bad_words=words if "bad words" in chosen else (),
            dry_breakers=words[:3],
            reasoning=_reasoning(draws, vocabulary) if thinks else None,
            max_tokens=sampling.max_tokens,
        ),
    )


def _reasoning(draws: random.Random, vocabulary: Vocabulary) -> ReasoningTokens:
    """Tags of any tokens; the closing one has two, or comes in one."""
    opening, first, second, closing, blank = draws.sample(range(vocabulary.size), 5)
    pieces = {
        opening: b"<think>",
        first: b"</",
        second: b"think>",
        closing: b"</think>",
        blank: b"\n",
    }
    return ReasoningTokens(
        b"<think>", b"</think>", (first, second), pieces, starts_open=draws.random() < 0.7
    )
