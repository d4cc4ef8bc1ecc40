"""The parts of a checkpoint that the server's process reads itself: tokenizer and chat template.

A child reads the same files. An engine on another host has its own copy of the checkpoint: digests
tell whether both give the same prompts.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from pathlib import Path

import msgspec

from quickstep.config import InputConfig, LoadConfig
from quickstep.engine.remote.messages import TextDigests
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.source import find_checkpoint, local_checkpoint, reading_checkpoint
from quickstep.text.chat_template import ChatTemplate, find_templates
from quickstep.text.tokenizer import Tokenizer
from quickstep.text.tokenizer_process import TokenizerProcess


class Texts(msgspec.Struct, frozen=True):
    """The tokenizer and the chat template of the checkpoint at `path`."""

    path: Path
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    @classmethod
    def open(cls, path: Path, inputs: InputConfig) -> Texts:
        """Read the checkpoint at `path`. Raises ConfigError."""
        tokenizer = Tokenizer.open(path, TokenizerProcess(path))
        template = ChatTemplate.open(path, tokenizer.special_tokens, datetime.now, inputs)
        return cls(path, tokenizer, template)

    @classmethod
    def ahead(cls, model: str, inputs: InputConfig) -> Texts | None:
        """Read a checkpoint that need not be downloaded; None if that has to be done later.

        The worker reports errors in the checkpoint, or else `open` does later.
        """
        try:
            found = local_checkpoint(model)
            return None if found is None else cls.open(found.path, inputs)
        except (ConfigError, OSError):
            return None

    @classmethod
    def own(cls, load: LoadConfig, inputs: InputConfig) -> Texts:
        """Find this host's copy of a model, or download it, and read it. Raises ConfigError."""
        return cls.open(find_checkpoint(load).path, inputs)

    def check(self, engine: TextDigests, engine_name: str) -> None:
        """Compare with the digests of an engine. Raises ConfigError if they differ."""
        own = text_digests(self.path, self.tokenizer)
        for what, ours, theirs in (
            ("tokenizer", own.tokenizer, engine.tokenizer),
            ("chat template", own.chat_template, engine.chat_template),
        ):
            if ours != theirs:
                raise ConfigError(
                    f"the {what} of {self.path} has the digest {ours}, that of {engine_name} "
                    f"{theirs}: both hosts need the same revision of the model"
                )


def text_digests(path: Path, tokenizer: Tokenizer) -> TextDigests:
    """The digests of a checkpoint. Raises ConfigError if it cannot be read."""
    with reading_checkpoint(path):
        templates = sorted(find_templates(path).items())
    return TextDigests(tokenizer.digest(), _digest(msgspec.json.encode(templates)))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
