"""Checkpoints with mistakes in any place load, or are refused in a sentence: `make fuzz`."""

from __future__ import annotations

from mutated_files import mutated_results


def test_checkpoints_with_mistakes_load_or_are_refused_in_a_sentence() -> None:
    sentences = list(mutated_results(100))
    refused = list(filter(None, sentences))
    assert 50 < len(refused) < len(sentences)
    assert len(set(refused)) > 25
