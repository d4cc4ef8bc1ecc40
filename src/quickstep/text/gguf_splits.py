"""How byte-level tokenizers in GGUF files split text before merging, by `tokenizer.ggml.pre`.

The names are llama.cpp's (`llama-vocab.cpp`), the expressions those of the tokenizers themselves
(`tokenizer.json`), which llama.cpp writes without the parts that its engine lacks. Names that it
handles in code of its own are missing and refused: `afmoe`, `chameleon`, `deepseek-llm`, `jais-2`,
`superbpe`, and those of tokenizers that are not byte-level (`gemma4`, `sarvam-moe`, `whitespace`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_REST_OR_SLASH = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NOT_HAN = r"&&[^\p{Han}]]"
_SYMBOL = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"


def _words(letters: str, digits: str, rest: str = _REST) -> str:
    """Contractions, letters after at most one other character, digits, and the rest."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}|{rest}"


def _cased(upper: str, lower: str, ending: str, digits: str, rest: str) -> str:
    """Words that begin a new piece where a capital follows a small letter."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return rf"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}|{digits}|{rest}"


class TextSplit(msgspec.Struct, frozen=True):
    """How text is split before merging: by the expressions, one after another.

    Attributes:
        ignore_merges: A piece that is a token is not split by merges.
        adds_bos: The default where the file does not say.
        composed: Text is normalized to NFC first.
    """

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    composed: bool = False


_ENDING = f"{_CONTRACTIONS}?"
_THREE_DIGITS = _words(r"\p{L}+", r"\p{N}{1,3}")
_ONE_DIGIT = _words(r"\p{L}+", r"\p{N}")
_GPT4O = _cased(_UPPER, _LOWER, _ENDING, r"\p{N}{1,3}", _REST_OR_SLASH)
_DEEPSEEK3 = TextSplit(
    (
        r"\p{N}{1,3}",
        _CJK,
        rf"{_SYMBOL}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)
_DEEPSEEK_CODER = TextSplit(
    ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
)
_KIMI = TextSplit(
    (
        r"\p{Han}+|"
        + _cased(
            _UPPER.removesuffix("]") + _NOT_HAN,
            _LOWER.removesuffix("]") + _NOT_HAN,
            _ENDING,
            r"\p{N}{1,3}",
            _REST,
        ),
    )
)
_BAILING = TextSplit(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_SEED_CODER = TextSplit((_words(r"\p{L}+", r"\p{N}", rf" ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"),))
_EXAONE_MOE = TextSplit(
    (
        _words(
            r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    )
)
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


def _named(names: str, split: TextSplit) -> dict[str, TextSplit]:
    return dict.fromkeys(names.split(), split)


SPLITS: Mapping[str, TextSplit] = MappingProxyType(
    {
        "default": TextSplit((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
        **_named(
            "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat jina-es jina-de jina-v2-es"
            " jina-v2-de a.x-4.0 mellum modern-bert exaone4",
            TextSplit((_GPT2,)),
        ),
        **_named(
            "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
            TextSplit((r"\p{N}", _GPT2)),
        ),
        **_named(
            "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
            TextSplit((_THREE_DIGITS,), ignore_merges=True, adds_bos=True),
        ),
        **_named("smaug-bpe dbrx glm4 chatglm-bpe", TextSplit((_THREE_DIGITS,))),
        **_named(
            "qwen2 deepseek-r1-qwen megrez kormo f2llmv2", TextSplit((_ONE_DIGIT,), composed=True)
        ),
        **_named("stablelm2 hunyuan solar-open grok-2", TextSplit((_ONE_DIGIT,))),
        "qwen35": TextSplit((_QWEN35,), composed=True),
        "ufakzeka": TextSplit((rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",)),
        "laguna": TextSplit((r"[^\n]+|[\n]+", _ONE_DIGIT)),
        "minicpm5": TextSplit((r"\p{N}{1,3}", _words(r"\p{L}+", r"\p{N}+")), ignore_merges=True),
        **_named("gpt-4o llama4 kanana2 talkie minimax-m2", TextSplit((_GPT4O,))),
        **_named("tiny_aya cohere2moe", TextSplit((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
        "tekken": TextSplit(
            (_cased(_UPPER, _LOWER, "", r"\p{N}", _REST_OR_SLASH),),
            ignore_merges=True,
            adds_bos=True,
        ),
        "youtu": TextSplit(
            (
                "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b"
                "\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _CJK,
                _cased(_UPPER, _LOWER, _ENDING, r"\p{N}", _REST_OR_SLASH),
            ),
            ignore_merges=True,
        ),
        **_named("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK3),
        "deepseek-coder": _DEEPSEEK_CODER,
        "falcon": TextSplit((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
        **_named("poro-chat bloom gpt3-finnish", TextSplit((_BLOOM,))),
        "viking": TextSplit((_BLOOM, r"\p{N}")),
        "kimi-k2": _KIMI,
        **_named("bailingmoe bailingmoe2 llada-moe", _BAILING),
        "seed-coder": _SEED_CODER,
        "exaone-moe": _EXAONE_MOE,
    }
)
