"""Opens the proposers that need no model, and says which one a checkpoint is for;
`engine.assembly` opens the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from quickstep.config import SpeculationConfig, SpeculationMethod
from quickstep.ops.native.backend import native_status
from quickstep.runtime.speculation.ngram import NgramProposer
from quickstep.runtime.speculation.proposer import Proposer
from quickstep.runtime.speculation.suffix import SuffixProposer

_MEDUSA = re.compile(r"(medusa_heads?\.)?\d+\.\d+\.(linear\.)?(weight|bias)")


def method_of_tensors(names: Iterable[str]) -> SpeculationMethod:
    """What a checkpoint with tensors of these names can be used for, as `--speculative-model`."""
    bare = {name.removeprefix("model.") for name in names}
    if "fc.weight" in bare:
        is_fused = any(name.startswith("midlayer.") for name in bare) or "d2t" in bare
        return SpeculationMethod.EAGLE3 if is_fused else SpeculationMethod.EAGLE
    if any(_MEDUSA.fullmatch(name) for name in bare):
        return SpeculationMethod.MEDUSA
    return SpeculationMethod.DRAFT


def open_lookup_proposers(config: SpeculationConfig) -> list[Proposer]:
    """Those that need no model. `auto` has `suffix`, and `ngram` where the native library is
    missing. Raises ConfigError for a bad setting.
    """
    methods = {proposer.method for proposer in config.proposers}
    if SpeculationMethod.AUTO in methods:
        has_library = native_status().available
        methods.add(SpeculationMethod.SUFFIX if has_library else SpeculationMethod.NGRAM)
    opened: list[Proposer] = []
    if SpeculationMethod.NGRAM in methods:
        opened.append(NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max))
    if SpeculationMethod.SUFFIX in methods:
        opened.append(_suffix(config))
    return opened


def _suffix(config: SpeculationConfig) -> SuffixProposer:
    return SuffixProposer(
        config.suffix_decoding_max_tree_depth,
        config.suffix_decoding_max_spec_factor,
        config.suffix_decoding_min_token_prob,
        config.suffix_decoding_max_cached_tokens,
    )
