"""Random requests for the exactness checker: narrow where batching has edges.

Prompt lengths sit at and around block edges, prompts share prefixes, every parameter of sampling
varies, some outputs follow a grammar, some requests are beam searches, and every request asks for
logprobs, because their bits show what token ids hide. `best_of` is `n` with logprobs: the best are
picked from what is compared anyway. A function of the seed alone. Called by `verify.checker`.
"""

from __future__ import annotations

import random
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from quickstep.engine.beam_search import BeamSearchParams
from quickstep.sampling_params import ReasoningTokens, TokenForms
from quickstep.types import Grammar, Pooling, Request, SamplingParams

__all__ = [
    "LONG_OUTPUTS",
    "MAX_OUTPUTS",
    "MAX_PROMPT_LEN",
    "RandomRequest",
    "Vocabulary",
    "random_requests",
]

MAX_PROMPT_LEN = 80
MAX_OUTPUTS = 64
# Some grow by several blocks: only those can starve a pool that has admitted them.
LONG_OUTPUTS = 40
_NUM_DOCUMENTS = 4
# Two in sixteen requests ask for an embedding.
_POOLINGS = MappingProxyType({7: Pooling.MEAN, 11: Pooling.LAST})
_BEAMS = 13  # one in sixteen is a beam search
_STOPS = ("e", " ", "th", "\n", "ing ", "0")
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
    Grammar.of_json_schema(
        {
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {
                        "kind": {"enum": ["leaf", "node", None, 3]},
                        "left": {"$ref": "#/$defs/tree"},
                        "on": {"type": "string", "format": "date"},
                    },
                    "required": ["kind"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/tree",
        }
    ),
    Grammar.of_regex("[a-z ]{3,30}[0-9.]"),
    Grammar.of_choice(["yes", "no", "it depends on the weather"]),
    Grammar.of_lark('start: "(" (start | WORD | NUMBER)* ")"\nWORD: /[a-z]+ /\nNUMBER: /[0-9.]+;/'),
    Grammar.of_gbnf('root ::= line{1,4}\nline ::= [a-z]+ "=" [0-9]{1,3} "\\n"\n'),
)


class Vocabulary(msgspec.Struct, frozen=True):
    """Token ids that requests may name, those that end a sequence, and whether grammars can be
    compiled; `texts` of tokens are what stop strings are made of.
    """

    size: int
    eos_token_ids: frozenset[int] = frozenset()
    has_grammars: bool = False
    texts: tuple[str, ...] = ()


class RandomRequest(msgspec.Struct, frozen=True):
    """A request to compare. With `beams` it is a search from the request's prompt, and the
    `sampling` of the request says how many results it has and which logprobs they get.
    """

    request: Request
    beams: BeamSearchParams | None = None

    @property
    def num_outputs(self) -> int:
        """The most output tokens that a sequence of it may have."""
        max_tokens = self.request.sampling.max_tokens
        return MAX_OUTPUTS if max_tokens is None else max_tokens


def random_requests(
    count: int, seed: int, vocabulary: Vocabulary, block_size: int, max_model_len: int
) -> list[RandomRequest]:
    """`count` requests with ids `r0`, `r1`, ...; no prompt fills `max_model_len`."""
    draws = random.Random(f"requests {seed}")
    longest = min(MAX_PROMPT_LEN, max_model_len - 1)
    documents = [
        [draws.randrange(vocabulary.size) for _ in range(longest)] for _ in range(_NUM_DOCUMENTS)
    ]
    return [
        _request(draws, index, documents, vocabulary, block_size, max_model_len)
        for index in range(count)
    ]


def _request(
    draws: random.Random,
    index: int,
    documents: list[list[int]],
    vocabulary: Vocabulary,
    block_size: int,
    max_model_len: int,
) -> RandomRequest:
    prompt = _prompt(draws, documents, vocabulary.size, block_size)
    room = max_model_len - len(prompt)
    pooling = _POOLINGS.get(index % 16)
    beams = None
    if index % 16 == _BEAMS:
        beams = _beams(draws)
        sampling = SamplingParams(
            n=beams.beam_width,
            temperature=0.0,
            max_tokens=beams.max_tokens,
            logprobs=draws.choice((0, 3)),
            prompt_logprobs=draws.choice((None, 2)),
        )
    else:
        sampling = _sampling(draws, vocabulary, is_long=index < 5 or index % 32 == 0)
        sampling = _with_features(draws, sampling, documents, vocabulary, room)
    if pooling is not None or sampling.max_tokens == 0:  # one prompt has one answer
        sampling = replace(sampling, n=1)
    request = Request(
        request_id=f"r{index}",
        prompt_token_ids=prompt,
        sampling=sampling,
        seed=draws.getrandbits(64),
        eos_token_ids=vocabulary.eos_token_ids,
        priority=draws.choice((0, 0, 0, 1)),
        cache_salt=draws.choice(("", "", "", "salt")),
        pooling=pooling,
    )
    return RandomRequest(request, beams)


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


def _beams(draws: random.Random) -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=draws.randint(1, 3),
        max_tokens=draws.randint(1, 8),
        ignore_eos=draws.random() < 0.5,
        length_penalty=draws.choice((1.0, 0.0, -0.5, 2.0)),
        early_stopping=draws.random() < 0.5,
    )


def _sampling(draws: random.Random, vocabulary: Vocabulary, is_long: bool) -> SamplingParams:
    def sometimes(probability: float, value: float, otherwise: float) -> float:
        return value if draws.random() < probability else otherwise

    def tokens(probability: float, most: int) -> tuple[int, ...]:
        size = vocabulary.size
        has_any = draws.random() < probability
        return tuple(draws.sample(range(size), min(most, size // 4))) if has_any else ()

    max_tokens: int | None = draws.randint(3, 7)
    if is_long:
        max_tokens = draws.choice((None, draws.randint(LONG_OUTPUTS, MAX_OUTPUTS)))
    penalised = 0.5 if is_long else 0.15
    biased, stops, asked_ids = tokens(0.1, 3), tokens(0.1, 20), tokens(0.1, 4)
    stop_strings: list[str] = []
    if vocabulary.texts and draws.random() < 0.15:
        stop_strings = draws.sample(_STOPS, 2) + draws.choices(vocabulary.texts, k=10)
    prompt_logprobs = draws.choice((0, 2)) if draws.random() < 0.15 else None
    if prompt_logprobs is not None and draws.random() < 0.2:
        max_tokens = 0
    return SamplingParams(
        n=draws.choice((2, 2, 3)) if draws.random() < 0.08 else 1,
        temperature=draws.choice((0.0, 0.8, 0.8, 1.3)) if draws.random() < 0.6 else 0.0,
        top_p=sometimes(0.3, 0.9, 1.0),
        top_k=20 if draws.random() < 0.2 else 0,
        min_p=sometimes(0.1, 0.05, 0.0),
        presence_penalty=sometimes(penalised, 1.5, 0.0),
        frequency_penalty=sometimes(penalised, 1.0, 0.0),
        repetition_penalty=sometimes(penalised, 1.2, 1.0),
        logit_bias=dict(zip(biased, (3.0, -100.0, 0.5), strict=False)),
        allowed_token_ids=tokens(0.05, 30),
        max_tokens=max_tokens,
        min_tokens=draws.randint(1, 3) if max_tokens != 0 and draws.random() < 0.2 else 0,
        stop=tuple(stop_strings),
        stop_token_ids=stops,
        include_stop_str_in_output=draws.random() < 0.5,
        ignore_eos=draws.random() < 0.5,
        skip_special_tokens=draws.random() < 0.5,
        logprobs=draws.choice((0, 0, 3)),
        logprob_token_ids=asked_ids,
        prompt_logprobs=prompt_logprobs,
    )


def _with_features(
    draws: random.Random,
    sampling: SamplingParams,
    documents: list[list[int]],
    vocabulary: Vocabulary,
    room: int,
) -> SamplingParams:
    """About half of the requests as they are, the others with one to three of what has a state, or
    draws, of its own. `room` tokens are left for the output.
    """
    if draws.random() < 0.5 or sampling.max_tokens == 0:
        return sampling
    names = ["typical", "xtc", "dry", "bad words", "thinking"]
    names += ["grammar"] * vocabulary.has_grammars
    chosen = draws.sample(names, draws.randint(1, 3))
    follows_grammar = "grammar" in chosen
    words = tuple(
        tuple(draws.choices(draws.choice(documents), k=draws.randint(1, 2))) for _ in range(8)
    )
    thinks = "thinking" in chosen
    # a grammar may follow a reasoning that nothing bounds
    has_budget = thinks and not (follows_grammar and draws.random() < 0.3)
    needs_draws = {"typical", "xtc"} & set(chosen) and not sampling.temperature
    return replace(
        sampling,
        temperature=0.8 if needs_draws else sampling.temperature,
        typical_p=0.8 if "typical" in chosen else 1.0,
        xtc_probability=0.5 if "xtc" in chosen else 0.0,
        xtc_threshold=draws.choice((0.1, 0.02)),
        dry_multiplier=0.8 if "dry" in chosen else 0.0,
        dry_base=draws.choice((1.75, 1.2)),
        dry_allowed_length=draws.choice((1, 2)),
        dry_range=draws.choice((0, 20)),
        thinking_budget=draws.randint(0, 6) if has_budget else None,
        grammar=draws.choice(_GRAMMARS) if follows_grammar else None,
        allowed_token_ids=() if follows_grammar else sampling.allowed_token_ids,
        ignore_eos=sampling.ignore_eos and not follows_grammar,
        in_tokens=TokenForms(
            bad_words=words if "bad words" in chosen else (),
            dry_breakers=words[:3],
            reasoning=_reasoning(draws, vocabulary) if thinks else None,
            max_tokens=room if sampling.max_tokens is None else min(room, sampling.max_tokens),
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
