"""A checkpoint's JSON files, and `config.json` in detail: typed access, defaults, the keys read.

Used by `architectures.py` and `rope_spec.py`. A key counts as honoured once it was read;
`refuse_unread` then names the first one that could change the computation and was not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quickstep.errors import ConfigError

# Keys that never change what a forward pass computes: metadata, training, generation defaults.
_HARMLESS_NAMES = """
    architectures model_type transformers_version torch_dtype dtype use_cache auto_map
    initializer_range embedding_initializer_range initializer_factor pretraining_tp
    gradient_checkpointing name_or_path num_logits_to_keep
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id
    decoder_start_token_id image_token_id image_token_index boi_token_index eoi_token_index
    boi_token_id eoi_token_id mm_tokens_per_image vision_config
    id2label label2id num_labels problem_type task_specific_params finetuning_task tokenizer_class
    prefix return_dict return_dict_in_generate output_attentions output_hidden_states
    output_router_logits output_scores torchscript use_bfloat16 tf_legacy_loss pruned_heads
    attn_implementation cache_implementation chunk_size_feed_forward is_composition is_decoder
    is_llama_config do_sample temperature top_k top_p typical_p num_beams num_beam_groups
    diversity_penalty length_penalty repetition_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids min_length max_length early_stopping
    num_return_sequences remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens forced_bos_token_id forced_eos_token_id
    tie_encoder_decoder embd_pdrop resid_pdrop
    attention_softmax_in_fp32 scale_attention_softmax_in_fp32 use_parallel_embedding
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
# of other programs, and of other modalities than text
_HARMLESS_PREFIXES = ("_", "unsloth_", "mergekit", "vision_", "image_", "video_", "audio_", "mm_")
# Keys at which the config classes of transformers replace a null by the family's default. A null
# `head_dim` or `num_key_value_heads` follows from other sizes (`spec.py`); other nulls are values.
_NULL_IS_ABSENT = frozenset({"rope_parameters"})
# Words of names with which a forward pass may be described. A key with none of them was written by
# another program for itself, and no token depends on it (docs/design/0047).
_COMPUTING_NAMES = """
    act add ahead alpha altup apply beta bias block blocks bottleneck cap causal clamp clip context
    cross d decay deep delta dense depth dim dims disable divisor dt emb enable eps expand ff ffn
    fourier func gate gated gating group groups hc head heads hyper index indexer init inner
    interval is kda key keys kv legacy loops mem memory mix mla mlp moe mtp mul mult n nope ntk
    offset offsets order parallel period pos q qk qkv query rank rel relu replace rms rnn rot
    segment share shared silu size sizes skip sparse ssm state states stride theta tie tied time
    topk transform use value values width with yarn
"""
_COMPUTING_WORDS = frozenset(_COMPUTING_NAMES.split())
_COMPUTING_PARTS = (
    *("activation", "adapter", "alibi", "attention", "attn", "chunk", "conv", "cutoff", "decoder"),
    *("embed", "embd", "encoder", "epsilon", "expert", "factor", "feedforward", "gelu", "hidden"),
    *("interleav", "intermediate", "kernel", "layer", "linear", "logit", "lora", "mamba", "mask"),
    *("mscale", "multipl", "mup", "norm", "pattern", "position", "proj", "quant", "recurrent"),
    *("resid", "rope", "rotary", "rout", "scal", "scor", "slid", "softcap", "softmax", "spars"),
    *("swiglu", "temperature", "window"),
)
_EXCERPT_CHARS = 80
MOST_LAYERS = 10_000  # a damaged count would keep every later step busy for hours
_WORD = re.compile(r"[a-z]+|[A-Z][a-z]*")
_HARMLESS_SUFFIXES = (
    *("_dropout", "_loss_coef", "_version", "jitter_noise"),
    *("_init_scale", "_use_xavier_init"),
)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no such file.

    Raises:
        ConfigError: The file cannot be read, or is not a JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # the latter below a GGUF file
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object, it holds a {type(content).__name__}")
    return content


class ConfigFields:
    """One config (or a part of one). `source` names it in messages."""

    def __init__(
        self, values: Mapping[str, object], defaults: Mapping[str, object], source: str
    ) -> None:
        self._values = values
        self._defaults = defaults
        self._read: set[str] = set()
        self.source = source

    def value(self, name: str) -> object:
        """The raw value, or the default where the key is absent; None where there is neither.

        An explicit null is a value: it switches a feature off that the family has by default.
        """
        self._read.add(name)
        if name in self._values and (self._values[name] is not None or name not in _NULL_IS_ABSENT):
            return self._values[name]
        return self._defaults.get(name)

    def optional_integer(self, name: str) -> int | None:
        """An int; None if the config has no value."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(name, value, "an integer")
        if isinstance(value, float) and not value.is_integer():
            raise self._wrong(name, value, "an integer")
        return int(value)

    def integer(self, name: str, most: int | None = None) -> int:
        """A positive int. Raises ConfigError when it is null, missing without a default, or above
        `most`.
        """
        value = self.optional_integer(name)
        if value is None:
            raise self._missing(name)
        if value < 1:
            raise self._wrong(name, value, "at least 1")
        if most is not None and value > most:
            raise self._wrong(name, value, f"at most {most}")
        return value

    def optional_number(self, name: str) -> float | None:
        """A float; None if the config has no value."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(name, value, "a number")
        return float(value)

    def number(self, name: str) -> float:
        """A float. Raises ConfigError when it is null, or missing without a default."""
        value = self.optional_number(name)
        if value is None:
            raise self._missing(name)
        return value

    def flag(self, name: str) -> bool:
        """A bool; absent is the architecture's default, or False."""
        value = self.value(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str) -> str:
        """A string; absent is ""."""
        value = self.value(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def sequence(self, name: str) -> Sequence[object] | None:
        """A list; None if the config has no value."""
        value = self.value(name)
        if value is not None and not isinstance(value, (list, tuple)):
            raise self._wrong(name, value, "a list")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """So many numbers, all 1 where there are none. Raises ConfigError for another count."""
        listed = self.sequence(name)
        found = [value for value in listed or () if isinstance(value, (int, float))]
        if listed is not None and len(found) != count:
            raise ConfigError(f"{self.source} sets {name!r} to {listed!r:.80}, not {count} numbers")
        return tuple(map(float, found)) or (1.0,) * count

    def only(self, name: str, supported: str) -> None:
        """Raise ConfigError for a text other than the one that is implemented."""
        value = self.text(name)
        if value not in ("", supported):
            raise ConfigError(
                f"{self.source} sets {name!r} to {value!r}; supported is {supported!r}"
            )

    def mapping(self, name: str) -> Mapping[str, object] | None:
        """An object; None if the config has no value."""
        value = self.value(name)
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        return value

    def repeated(self, name: str, other: str) -> None:
        """Read a key that says the same as another one. Raises ConfigError where it does not."""
        value, meant = self.value(name), self.value(other)
        if value not in (None, meant):
            raise ConfigError(
                f"{self.source} sets {other!r} to {meant!r} and {name!r} to {value!r}; they mean "
                "the same"
            )

    def refuse_unread(self, neutral: Mapping[str, object]) -> None:
        """Raise ConfigError for a key that was not honoured and may change the computation.

        Falsy values switch a feature off and pass, but for a false where `neutral` has a true;
        `neutral` ones pass by key and value.
        """
        for name in self._unread(neutral):
            raise self._not_implemented(name)

    def foreign(self, neutral: Mapping[str, object]) -> tuple[str, ...]:
        """As `refuse_unread`, but keys whose names have no word of a computation are accepted.

        Returns:
            Those, which the reader has no use for.
        """
        names = tuple(self._unread(neutral))
        for name in names:
            if _may_compute(name):
                raise self._not_implemented(name)
        return names

    def _unread(self, neutral: Mapping[str, object]) -> Iterator[str]:
        for name, value in self._values.items():
            if name in self._read or name in _HARMLESS:
                continue
            is_required = value is False and neutral.get(name) is True
            if not value and not is_required:
                continue
            if name.startswith(_HARMLESS_PREFIXES) or name.endswith(_HARMLESS_SUFFIXES):
                continue
            if name in neutral and neutral[name] == value:
                continue
            yield name

    def _not_implemented(self, name: str) -> ConfigError:
        return ConfigError(
            f"{self.source} sets {name!r} to {_excerpt(self._values[name])}, which Quickstep does "
            "not implement for this architecture; remove the key only if it does not change the "
            "computation"
        )

    def _missing(self, name: str) -> ConfigError:
        does = f"sets {name!r} to null" if name in self._values else f"lacks {name!r}"
        return ConfigError(f"{self.source} {does}, which this architecture needs")

    def _wrong(self, name: str, value: object, expected: str) -> ConfigError:
        return ConfigError(
            f"{self.source} sets {name!r} to {_excerpt(value)}, it must be {expected}"
        )


def _excerpt(value: object) -> str:
    """A value in a message, which may be a list as long as the vocabulary."""
    text = repr(value)
    return text if len(text) <= _EXCERPT_CHARS else f"{text[:_EXCERPT_CHARS]}..."


def note_on_foreign(names: Sequence[str]) -> Iterator[str]:
    """The sentence on what `ConfigFields.foreign` returned, if there is something."""
    if names:
        yield f"config.json's {', '.join(names)} are no part of the architecture and not used"


def _may_compute(name: str) -> bool:
    """Whether a forward pass could read a key of this name. One with a dot is in another program's
    namespace; `flash` chooses a kernel, not a result.
    """
    if "." in name or "flash" in name:
        return False
    words = [word.lower() for word in _WORD.findall(name)]
    if not _COMPUTING_WORDS.isdisjoint(words):
        return True
    return any(part in name.lower() for part in _COMPUTING_PARTS)
