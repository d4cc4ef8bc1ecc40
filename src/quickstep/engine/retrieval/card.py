"""`Retrieval`: how a model embeds texts and scores pairs, from its sentence-transformers files.

    modules.json                      what follows the transformer: Pooling, Normalize, LogitScore
    1_Pooling/config.json             how hidden states become one vector
    1_LogitScore/config.json          the two tokens whose logits are the score of a pair
    config_sentence_transformers.json texts before inputs, by task

`engine.assembly` reads it once, the server and `LLM` use it. A module that is not implemented
becomes the sentence with which embeddings are refused: a wrong vector looks like a right one.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import read_json
from quickstep.types import Pooling

_POOLINGS = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_cls_token": Pooling.CLS,
    # the values of `pooling_mode`, which newer files have instead
    "mean": Pooling.MEAN,
    "lasttoken": Pooling.LAST,
    "cls": Pooling.CLS,
}
# Vectors have length 1 in any case.
_IMPLEMENTED = {"Transformer", "Pooling", "Normalize", "LogitScore"}


class Scoring(enum.Enum):
    """How a query and a document become a score."""

    COSINE = "cosine"
    TOKENS = "tokens"
    CLASS = "class"


class Retrieval(msgspec.Struct, frozen=True):
    """How a model embeds texts and scores pairs of them.

    Attributes:
        pooling: How hidden states become one vector.
        scoring: COSINE compares the two embeddings. TOKENS asks the model about the pair: the
            score is the probability of `true_token_id` against that of `false_token_id`. CLASS
            reads the pair as one text, and the score is the sigmoid of the only class's logit.
        prompts: Texts before an input, by task.
        default_prompt: The task of inputs that name none; "" for no prompt.
        reads_pairs: The chat template has the roles `query` and `document`; otherwise the pair is
            written into a question that a user asks.
        refusal: Why embeddings are refused; "" if they are not.
        scoring_refusal: The same of scores.
        text_refusal: The same of generated text.
        is_encoder: Tokens see those after them too.
        labels: The classes of a classification head; () without one.
    """

    pooling: Pooling = Pooling.LAST
    scoring: Scoring = Scoring.COSINE
    true_token_id: int = 0
    false_token_id: int = 0
    prompts: Mapping[str, str] = MappingProxyType({})
    default_prompt: str = ""
    reads_pairs: bool = False
    refusal: str = ""
    scoring_refusal: str = ""
    text_refusal: str = ""
    is_encoder: bool = False
    labels: tuple[str, ...] = ()


def read_retrieval(
    path: Path, yes: int | None, no: int | None, default_pooling: Pooling = Pooling.LAST
) -> Retrieval:
    """Read the files of a checkpoint. A model without them is asked about pairs, if its vocabulary
    has the tokens `yes` and `no`.

    Raises:
        ConfigError: A file cannot be read.
    """
    modules = dict(_modules(path))
    card = read_json(path / modules.get("Pooling", "1_Pooling") / "config.json")
    settings = read_json(path / "config_sentence_transformers.json")
    prompts = {
        name: text for name, text in _mapping(settings, "prompts").items() if isinstance(text, str)
    }
    pooling, refusal = _pooling(card, prompts, default_pooling)
    missing = sorted(set(modules) - _IMPLEMENTED)
    if missing:
        refusal = f"the model's embeddings need its module {missing[0]}, which is not implemented"
    default = settings.get("default_prompt_name")
    retrieval = Retrieval(
        pooling=pooling,
        prompts=prompts,
        default_prompt=default if isinstance(default, str) and default in prompts else "",
        refusal=refusal,
        scoring_refusal=refusal,
    )
    if "LogitScore" in modules:
        return _with_logit_score(retrieval, read_json(path / modules["LogitScore"] / "config.json"))
    if yes is None or no is None or modules or card:
        return retrieval
    return msgspec.structs.replace(
        retrieval, scoring=Scoring.TOKENS, true_token_id=yes, false_token_id=no
    )


def _with_logit_score(retrieval: Retrieval, config: Mapping[str, object]) -> Retrieval:
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    if not isinstance(yes, int) or not isinstance(no, int):
        why = "the model's scores are the logit of one token, without another to compare it with"
        return msgspec.structs.replace(retrieval, scoring_refusal=f"{why}: not implemented")
    return msgspec.structs.replace(
        retrieval,
        scoring=Scoring.TOKENS,
        true_token_id=yes,
        false_token_id=no,
        reads_pairs=True,
        scoring_refusal="",
    )


def _modules(path: Path) -> Iterator[tuple[str, str]]:
    """The kind and the folder of each module."""
    file = path / "modules.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    entries = content if isinstance(content, list) else [content]
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            raise ConfigError(f"{file} must hold a list of modules, each with a type")
        yield entry["type"].rpartition(".")[2], _folder(file, entry.get("path", ""))


def _folder(file: Path, name: object) -> str:
    """A folder's name. ConfigError for a path out of the checkpoint."""
    if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ConfigError(f"{file} names the folder {name!r}, which is not in the checkpoint")
    return name


def _pooling(
    card: Mapping[str, object], prompts: Mapping[str, str], default: Pooling
) -> tuple[Pooling, str]:
    """The pooling of a card, and why it is refused."""
    mode = card.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else []
    modes += [name for name, on in card.items() if on is True and name.startswith("pooling_mode_")]
    if not modes:
        return default, ""
    if len(modes) > 1 or modes[0] not in _POOLINGS:
        names = " and ".join(modes)
        return Pooling.LAST, f"the model's embeddings are pooled by {names}: not implemented"
    pooling = _POOLINGS[modes[0]]
    if card.get("include_prompt") is False and any(prompts.values()) and pooling is Pooling.MEAN:
        why = "the model's embeddings are the mean without the prompt's tokens: not implemented"
        return pooling, why
    return pooling, ""


def _mapping(values: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = values.get(name)
    return value if isinstance(value, Mapping) else {}
