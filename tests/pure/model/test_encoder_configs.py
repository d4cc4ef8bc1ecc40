"""Configs of released encoders are read; keys that change the computation are refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from quickstep.errors import ConfigError
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.spec import read_spec

BERT = {
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 384,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "torch_dtype": "float32",
    "transformers_version": "4.30.0",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30_522,
}
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 8194,
    "model_type": "xlm-roberta",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "output_past": True,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "vocab_size": 250_002,
}
MODERN = {
    "architectures": ["ModernBertModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 50_281,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "cls_token_id": 50_281,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "eos_token_id": 50_282,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160_000.0,
    "gradient_checkpointing": False,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "intermediate_size": 1152,
    "layer_norm_eps": 1e-5,
    "local_attention": 128,
    "local_rope_theta": 10_000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-5,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "pad_token_id": 50_283,
    "position_embedding_type": "absolute",
    "reference_compile": None,
    "repad_logits_with_grad": False,
    "sep_token_id": 50_282,
    "sparse_pred_ignore_index": -100,
    "sparse_prediction": False,
    "torch_dtype": "float32",
    "transformers_version": "4.48.0",
    "vocab_size": 50_368,
}
PUBLISHED: dict[str, dict[str, object]] = {
    "bge-small-en-v1.5": BERT | {"_name_or_path": "a", "id2label": {"0": "LABEL_0"}},
    "bert-base-multilingual-cased": BERT
    | {"architectures": ["BertForMaskedLM"], "directionality": "bidi", "pooler_fc_size": 768}
    | {"pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3, "pooler_size_per_head": 128}
    | {"pooler_type": "first_token_transform", "vocab_size": 119_547},
    "ms-marco-MiniLM-L6-v2": BERT
    | {"architectures": ["BertForSequenceClassification"], "num_hidden_layers": 6}
    | {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    | {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    | {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
    "bge-m3": BERT | LARGE | {"architectures": ["XLMRobertaModel"]},
    "bge-reranker-v2-m3": BERT
    | LARGE
    | {"architectures": ["XLMRobertaForSequenceClassification"], "id2label": {"0": "LABEL_0"}},
    "all-roberta-large-v1": BERT
    | LARGE
    | {"architectures": ["RobertaModel"], "max_position_embeddings": 514, "vocab_size": 50_265},
    "gte-modernbert-base": MODERN,
}
SEPARATOR = {"added_tokens": [{"content": "[CLS]", "id": 101}, {"content": "[SEP]", "id": 102}]}


def read(path: Path, config: dict[str, object]) -> ModelSpec:
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(json.dumps(SEPARATOR))
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    file = path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    return read_spec(path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_released_config_is_read(tmp_path: Path, name: str) -> None:
    spec, config = read(tmp_path, PUBLISHED[name]), PUBLISHED[name]
    assert spec.encoder is not None
    num_positions = config["max_position_embeddings"]
    is_roberta = spec.encoder.family == "roberta"
    assert spec.encoder.first_position == (2 if is_roberta else 0)
    assert spec.max_model_len == (num_positions - 2 if is_roberta else num_positions)
    assert spec.encoder.separator_id == (102 if name == "ms-marco-MiniLM-L6-v2" else None)
    assert spec.norm_eps == config["layer_norm_eps"]


def test_modernbert_has_windows_but_in_every_third_layer(tmp_path: Path) -> None:
    spec = read(tmp_path, MODERN)
    assert [layer.window for layer in spec.layers[:5]] == [None, 64, 64, None, 64]
    assert [spec.ropes[layer.rope or 0].theta for layer in spec.layers[:2]] == [160_000.0, 10_000.0]


def test_positions_of_roberta_start_after_those_of_padding_without_a_key_too(
    tmp_path: Path,
) -> None:
    config = {key: value for key, value in PUBLISHED["bge-m3"].items() if key != "pad_token_id"}
    spec = read(tmp_path, config)
    assert spec.encoder is not None and spec.encoder.first_position == 2


def test_segments_of_roberta_are_all_the_first_one(tmp_path: Path) -> None:
    spec = read(tmp_path, PUBLISHED["bge-reranker-v2-m3"] | {"type_vocab_size": 2})
    assert spec.encoder is not None and spec.encoder.separator_id is None


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bge-small-en-v1.5", {"embedding_size": 128}),
        ("bge-small-en-v1.5", {"attention_head_scale": 2.0}),
        ("bge-m3", {"rope_theta": 10_000.0}),
        ("gte-modernbert-base", {"rope_scaling": {"type": "yarn", "factor": 2.0}}),
        ("gte-modernbert-base", {"layer_types": ["chunked_attention"] * 22}),
    ],
)
def test_a_key_that_changes_the_computation_is_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, object]
) -> None:
    why = "chunked_attention" if "layer_types" in changes else next(iter(changes))
    with pytest.raises(ConfigError, match=why):
        read(tmp_path, PUBLISHED[name] | changes)


def test_a_key_of_another_program_is_reported(tmp_path: Path) -> None:
    spec = read(tmp_path, BERT | {"my_training_run": "a"})
    assert spec.notes == (
        "config.json's my_training_run are no part of the architecture and not used",
    )
