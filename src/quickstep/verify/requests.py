"""Random requests for the exactness checker: narrow where batching has edges.

Prompt lengths sit at and around block edges, prompts share prefixes, every parameter of sampling
varies, some outputs follow a grammar, some requests are beam searches, and every request asks for
logprobs, because their bits show what token ids hide. `best_of` is `n` with logprobs: the best are
picked from what is compared anyway. A function of the seed only. Called by `verify.checker`.
"""

from __future__ import annotations

import random
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from quickstep.engine.beam_search import BeamSearchParams
from quickstep.sampling_params import ReasoningTokens, RepetitionDetectionParams, TokenForms
from quickstep.types import Grammar, Pooling, Request, SamplingParams

MAX_PROMPT_LEN = 80
MAX_OUTPUTS = 64
# Some grow by several blocks: only those can starve a pool that has admitted them.
LONG_OUTPUTS = 40
_NUM_DOCUMENTS = 4
# Three in sixteen requests ask for an embedding.
_POOLINGS = MappingProxyType({7: Pooling.MEAN, 11: Pooling.LAST, 15: Pooling.CLS})
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


class RequestVocabulary(msgspec.Struct, frozen=True):
    """Token ids that requests may name, those that end a sequence, and whether grammars can be
    compiled; `texts` of tokens are what stop strings are made of; `adapters` are content ids.
    """

    size: int
    eos_token_ids: frozenset[int] = frozenset()
    has_grammars: bool = False
    texts: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()


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
    count: int, seed: int, vocabulary: RequestVocabulary, block_size: int, max_model_len: int
) -> list[RandomRequest]:
    """`count` requests with ids `r0`, `r1`, ...; no prompt fills `max_model_len`."""
    rng = random.Random(f"requests {seed}")
    longest = min(MAX_PROMPT_LEN, max_model_len - 1)
    documents = [
        [rng.randrange(vocabulary.size) for _ in range(longest)] for _ in range(_NUM_DOCUMENTS)
    ]
    return [
        _request(rng, index, documents, vocabulary, block_size, max_model_len)
        for index in range(count)
    ]


def _request(
    rng: random.Random,
    index: int,
    documents: list[list[int]],
    vocabulary: RequestVocabulary,
    block_size: int,
    max_model_len: int,
) -> RandomRequest:
    prompt = _prompt(rng, documents, vocabulary.size, block_size)
    max_output = max_model_len - len(prompt)
    pooling = _POOLINGS.get(index % 16)
    beams = None
    if index % 16 == _BEAMS:
        beams = _beams(rng)
        sampling = SamplingParams(
            n=beams.beam_width,
            temperature=0.0,
            max_tokens=beams.max_tokens,
            logprobs=rng.choice((0, 3)),
            prompt_logprobs=rng.choice((None, 2)),
        )
    else:
        sampling = _sampling(rng, vocabulary, is_long=index < 5 or index % 32 == 0)
        sampling = _with_features(rng, sampling, documents, vocabulary, max_output)
    if pooling is not None or sampling.max_tokens == 0:  # one prompt has one answer
        sampling = replace(sampling, n=1)
    request = Request(
        request_id=f"r{index}",
        prompt_token_ids=prompt,
        sampling=sampling,
        seed=rng.getrandbits(64),
        eos_token_ids=vocabulary.eos_token_ids,
        priority=rng.choice((0, 0, 0, 1)),
        cache_salt=rng.choice(("", "", "", "salt")),
        pooling=pooling,
        adapter_id=_adapter(rng, vocabulary.adapters) if vocabulary.adapters else "",
    )
    return RandomRequest(request, beams)


def _adapter(rng: random.Random, adapters: tuple[str, ...]) -> str:
    """Half of the requests have one, the first ones most often."""
    if rng.random() < 0.5:
        return ""
    return adapters[int(len(adapters) * rng.random() ** 2)]


def _prompt(
    rng: random.Random, documents: list[list[int]], vocab_size: int, block_size: int
) -> tuple[int, ...]:
    document = rng.choice(documents)
    length = _length(rng, len(document), block_size)
    num_shared = min(length, _length(rng, len(document), block_size)) if rng.random() < 0.7 else 0
    tail = [rng.randrange(vocab_size) for _ in range(length - num_shared)]
    return (*document[:num_shared], *tail)


def _length(rng: random.Random, longest: int, block_size: int) -> int:
    """Half at block edges or one next to them, half anywhere."""
    if rng.random() < 0.5:
        edge = block_size * rng.randint(1, max(1, longest // block_size))
        length = edge + rng.choice((-1, 0, 1))
    else:
        length = rng.randint(1, longest)
    return min(max(length, 1), longest)


def _beams(rng: random.Random) -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=rng.randint(1, 3),
        max_tokens=rng.randint(1, 8),
        ignore_eos=rng.random() < 0.5,
        length_penalty=rng.choice((1.0, 0.0, -0.5, 2.0)),
        early_stopping=rng.random() < 0.5,
    )


def _sampling(rng: random.Random, vocabulary: RequestVocabulary, is_long: bool) -> SamplingParams:
    def sometimes(probability: float, value: float, otherwise: float) -> float:
        return value if rng.random() < probability else otherwise

    def tokens(probability: float, most: int) -> tuple[int, ...]:
        size = vocabulary.size
        has_any = rng.random() < probability
        return tuple(rng.sample(range(size), min(most, size // 4))) if has_any else ()

    max_tokens: int | None = rng.randint(3, 7)
    if is_long:
        max_tokens = rng.choice((None, rng.randint(LONG_OUTPUTS, MAX_OUTPUTS)))
    penalised = 0.5 if is_long else 0.15
    biased, stops, asked_ids = tokens(0.1, 3), tokens(0.1, 20), tokens(0.1, 4)
    stop_strings: list[str] = []
    if vocabulary.texts and rng.random() < 0.15:
        stop_strings = rng.sample(_STOPS, 2) + rng.choices(vocabulary.texts, k=10)
    prompt_logprobs = rng.choice((0, 2)) if rng.random() < 0.15 else None
    if prompt_logprobs is not None and rng.random() < 0.2:
        max_tokens = 0
    return SamplingParams(
        n=rng.choice((2, 2, 3)) if rng.random() < 0.08 else 1,
        temperature=rng.choice((0.0, 0.8, 0.8, 1.3)) if rng.random() < 0.6 else 0.0,
        top_p=sometimes(0.3, 0.9, 1.0),
        top_k=20 if rng.random() < 0.2 else 0,
        min_p=sometimes(0.1, 0.05, 0.0),
        presence_penalty=sometimes(penalised, 1.5, 0.0),
        frequency_penalty=sometimes(penalised, 1.0, 0.0),
        repetition_penalty=sometimes(penalised, 1.2, 1.0),
        logit_bias=dict(zip(biased, (3.0, -100.0, 0.5), strict=False)),
        allowed_token_ids=tokens(0.05, 30),
        max_tokens=max_tokens,
        min_tokens=rng.randint(1, 3) if max_tokens != 0 and rng.random() < 0.2 else 0,
        stop=tuple(stop_strings),
        stop_token_ids=stops,
        include_stop_str_in_output=rng.random() < 0.5,
        ignore_eos=rng.random() < 0.5,
        skip_special_tokens=rng.random() < 0.5,
        logprobs=rng.choice((0, 0, 3)),
        logprob_token_ids=asked_ids,
        prompt_logprobs=prompt_logprobs,
    )


# sizes and count: some end an output of three tokens, some only a long one
_REPETITIONS = ((1, 0, 2), (2, 1, 2), (3, 2, 2), (4, 1, 3))


def _with_features(
    rng: random.Random,
    sampling: SamplingParams,
    documents: list[list[int]],
    vocabulary: RequestVocabulary,
    max_output: int,
) -> SamplingParams:
    """About half of the requests unchanged, the others with one to three features that have their
    own state or random numbers. `max_output` tokens of the context remain for the output.
    """
    if rng.random() < 0.5 or sampling.max_tokens == 0:
        return sampling
    names = ["typical", "xtc", "dry", "bad words", "thinking", "repetition"]
    names += ["grammar"] * vocabulary.has_grammars
    chosen = rng.sample(names, rng.randint(1, 3))
    follows_grammar = "grammar" in chosen
    words = tuple(tuple(rng.choices(rng.choice(documents), k=rng.randint(1, 2))) for _ in range(8))
    thinks = "thinking" in chosen
    # a grammar may follow a reasoning that nothing bounds
    has_budget = thinks and not (follows_grammar and rng.random() < 0.3)
    repeats = "repetition" in chosen and not follows_grammar
    allowed = sampling.allowed_token_ids
    if repeats:  # of two tokens, which soon repeat themselves
        allowed = tuple(rng.sample(range(vocabulary.size), 2))
    needs_draws = {"typical", "xtc"} & set(chosen) and not sampling.temperature
    return replace(
        sampling,
        temperature=0.8 if needs_draws else sampling.temperature,
        typical_p=0.8 if "typical" in chosen else 1.0,
        xtc_probability=0.5 if "xtc" in chosen else 0.0,
        xtc_threshold=rng.choice((0.1, 0.02)),
        dry_multiplier=0.8 if "dry" in chosen else 0.0,
        dry_base=rng.choice((1.75, 1.2)),
        dry_allowed_length=rng.choice((1, 2)),
        dry_range=rng.choice((0, 20)),
        thinking_budget=rng.randint(0, 6) if has_budget else None,
        grammar=rng.choice(_GRAMMARS) if follows_grammar else None,
        repetition_detection=RepetitionDetectionParams(*rng.choice(_REPETITIONS))
        if "repetition" in chosen
        else None,
        allowed_token_ids=() if follows_grammar else allowed,
        ignore_eos=sampling.ignore_eos and not follows_grammar,
        in_tokens=TokenForms(
            bad_words=words if "bad words" in chosen else (),
            dry_breakers=words[:3],
            reasoning=_reasoning(rng, vocabulary) if thinks else None,
            max_tokens=max_output
            if sampling.max_tokens is None
            else min(max_output, sampling.max_tokens),
        ),
    )


def _reasoning(rng: random.Random, vocabulary: RequestVocabulary) -> ReasoningTokens:
    """Tags of any tokens; the closing one has two, or comes in one."""
    opening, first, second, closing, blank = rng.sample(range(vocabulary.size), 5)
    pieces = {
        opening: b"<think>",
        first: b"</",
        second: b"think>",
        closing: b"</think>",
        blank: b"\n",
    }
    return ReasoningTokens(
        b"<think>",
        b"</think>",
        (first, second),
        pieces,
        starts_open=rng.random() < 0.7,
        message_ids=tuple(rng.sample(range(vocabulary.size), rng.choice((0, 0, 3)))),
    )
