"""Opens the proposers that need no model; `engine.assembly` opens the others."""

from __future__ import annotations

from quickstep.config import SpeculationConfig, SpeculationMethod
from quickstep.runtime.speculation.ngram import NgramProposer
from quickstep.runtime.speculation.proposer import Proposer
from quickstep.runtime.speculation.suffix import SuffixProposer

__all__ = ["open_proposer"]


def open_proposer(config: SpeculationConfig) -> Proposer | None:
    """The proposer, None for the method `off`. Raises ConfigError for a bad setting."""
    if config.method is SpeculationMethod.OFF:
        return None
    if config.method is SpeculationMethod.NGRAM:
        return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    return SuffixProposer(
        config.suffix_decoding_max_tree_depth,
        config.suffix_decoding_max_spec_factor,
        config.suffix_decoding_min_token_prob,
        config.suffix_decoding_max_cached_tokens,
    )
