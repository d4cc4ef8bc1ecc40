"""Scores and embeddings of a tiny checkpoint with sentence-transformers files, against a dense
forward of transformers.
"""

import json
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import VOCAB, write_checkpoint, write_tokenizer
from transformers import (
    AutoModel,
    LlamaForCausalLM,
    MistralConfig,
    MistralModel,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3Model,
)

from quickstep import LLM
from quickstep.errors import ConfigError, RequestError
from quickstep.types import Pooling

PAIRS = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}=>{% endif %}"
)
QUERY = "which animals are kept as pets in a flat?"
DOCUMENTS = ["dogs and cats", "a long text about engines, " * 3, "fish", ""]
YES, NO = 57, 46


def write_files(path: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        file = path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))
    return path


def modules(*kinds: str) -> list[dict[str, object]]:
    return [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "", "type": kind}
        for index, kind in enumerate(f"sentence_transformers.models.{kind}" for kind in kinds)
    ]


def logits(path: Path, ids: list[int]) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        output = model(torch.tensor([ids]), output_hidden_states=True)
    return output


def test_a_reranker_of_two_tokens_scores_as_transformers_does(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "reranker", PAIRS, max_len=512)
    head = modules("Transformer", "LogitScore")
    write_files(
        path,
        {
            "modules.json": head,
            f"{head[1]['path']}/config.json": {"true_token_id": YES, "false_token_id": NO},
            "config_sentence_transformers.json": {
                "prompts": {"web": "find pages"},
                "default_prompt_name": "web",
            },
        },
    )
    with LLM(str(path), num_threads=1) as llm:
        outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        for document, output in zip(DOCUMENTS, outputs, strict=True):
            text = f"[system] find pages\n[query] {QUERY}\n[document] {document}\n=>"
            ids = llm.get_tokenizer().encode(text, False)
            assert list(output.prompt_token_ids) == ids
            last = logits(path, ids).logits[0, -1]
            expected = torch.sigmoid(last[YES] - last[NO]).item()
            assert output.outputs.score == pytest.approx(expected, abs=1e-5)
        alone = [llm.score(QUERY, document, use_tqdm=False)[0] for document in DOCUMENTS]
        assert [each.outputs for each in alone] == [each.outputs for each in outputs]
        assert alone[1].num_cached_tokens > 0
        ranked = llm.rerank(QUERY, DOCUMENTS, use_tqdm=False, top_n=2)
        scores = [output.outputs.score for output in outputs]
        assert [each.relevance_score for each in ranked] == sorted(scores, reverse=True)[:2]
        assert [DOCUMENTS[each.index] for each in ranked] == [each.document for each in ranked]
        with pytest.raises(RequestError, match="prompt is too long"):
            llm.score(QUERY, "x" * 600)
        [cut] = llm.score(QUERY, "x" * 600, use_tqdm=False, truncate_prompt_tokens=100)
        assert len(cut.prompt_token_ids) == 100


@pytest.mark.parametrize(
    ("card", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, Pooling.MEAN),
        ({"pooling_mode_lasttoken": True}, Pooling.LAST),
        ({"pooling_mode": "cls"}, Pooling.CLS),
    ],
)
def test_poolings_and_prompts_of_the_card(
    tmp_path: Path, card: dict[str, object], pooling: Pooling
) -> None:
    path = write_checkpoint(tmp_path / "embedder")
    parts = modules("Transformer", "Pooling", "Normalize")
    write_files(
        path,
        {
            "modules.json": parts,
            f"{parts[1]['path']}/config.json": card,
            "config_sentence_transformers.json": {"prompts": {"query": "Q: ", "document": "D: "}},
        },
    )

    def expected(ids: list[int]) -> torch.Tensor:
        states = logits(path, ids).hidden_states[-1][0]
        pooled = {
            Pooling.MEAN: states.mean(0),
            Pooling.LAST: states[-1],
            Pooling.CLS: states[0],
        }[pooling]
        return torch.nn.functional.normalize(pooled, dim=0)

    with LLM(str(path), num_threads=1) as llm:
        encode = llm.get_tokenizer().encode
        texts = ["cats", "a text of several blocks, " * 3]
        vectors = [expected(encode(f"D: {text}")) for text in texts]
        outputs = llm.embed(texts, use_tqdm=False, input_type="document")
        for output, vector in zip(outputs, vectors, strict=True):
            found = torch.tensor(output.outputs.embedding)
            torch.testing.assert_close(found, vector, atol=1e-5, rtol=0)
        query = expected(encode("Q: pets"))
        scores = llm.score("pets", texts, use_tqdm=False)
        assert [output.outputs.score for output in scores] == pytest.approx(
            [torch.dot(query, vector).item() for vector in vectors], abs=1e-5
        )


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 256,
}


def write_embedder(
    path: Path,
    model: type[PreTrainedModel],
    config: type[PretrainedConfig],
    changes: dict[str, object],
    *,
    has_modules: bool,
) -> Path:
    """The decoder by itself, as released models for embeddings store it: without `model.` before
    its names and without an output projection.
    """
    torch.manual_seed(3)
    model(config(**SIZES)).save_pretrained(path)
    file = path / "config.json"
    write_files(path, {"config.json": json.loads(file.read_text()) | changes})
    write_tokenizer(path, "")
    if has_modules:
        parts = modules("Transformer", "Pooling", "Normalize")
        card = {"pooling_mode_lasttoken": True}
        write_files(path, {"modules.json": parts, f"{parts[1]['path']}/config.json": card})
    return path


@pytest.mark.parametrize(
    ("model", "config", "changes", "has_modules"),
    [
        (Qwen3Model, Qwen3Config, {"architectures": ["Qwen3ForCausalLM"]}, True),
        (
            Qwen3Model,
            Qwen3Config,
            {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
            True,
        ),
        (MistralModel, MistralConfig, {}, True),
        (MistralModel, MistralConfig, {}, False),
    ],
    ids=["Qwen3-Embedding-8B", "Qwen3-Embedding-0.6B", "e5-mistral", "base model"],
)
def test_decoders_without_output_projection_embed_texts(
    tmp_path: Path,
    model: type[PreTrainedModel],
    config: type[PretrainedConfig],
    changes: dict[str, object],
    has_modules: bool,
) -> None:
    path = write_embedder(tmp_path / "model", model, config, changes, has_modules=has_modules)
    dense = AutoModel.from_pretrained(path, dtype=torch.float32)
    texts = ["cats", "a text of several blocks, " * 3]
    with LLM(str(path), num_threads=1) as llm:
        ids = [llm.get_tokenizer().encode(text) for text in texts]
        with torch.no_grad():
            states = [dense(torch.tensor([each])).last_hidden_state[0, -1] for each in ids]
        vectors = [torch.nn.functional.normalize(state, dim=0) for state in states]
        outputs = llm.embed(texts, use_tqdm=False)
        for output, vector in zip(outputs, vectors, strict=True):
            found = torch.tensor(output.outputs.embedding)
            torch.testing.assert_close(found, vector, atol=1e-5, rtol=0)
        [score] = llm.score(texts[0], texts[1], use_tqdm=False)
        assert score.outputs.score == pytest.approx(torch.dot(*vectors).item(), abs=1e-5)
        if not changes.get("tie_word_embeddings"):  # else the embedding is the projection
            with pytest.raises(RequestError, match="no output projection: it embeds texts"):
                llm.generate("cats", use_tqdm=False)


def test_a_projection_that_is_missing_elsewhere_is_a_fault(tmp_path: Path) -> None:
    """Without the files of sentence-transformers it is a checkpoint that lost a tensor."""
    changes = {"architectures": ["Qwen3ForCausalLM"]}
    path = write_embedder(tmp_path, Qwen3Model, Qwen3Config, changes, has_modules=False)
    with pytest.raises(ConfigError, match=r"lm_head\.weight.* missing .*tie_word_embeddings"):
        LLM(str(path))


def test_a_decoder_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    changes = {"architectures": ["Qwen3ForCausalLM"], "is_causal": False}
    path = write_embedder(tmp_path, Qwen3Model, Qwen3Config, changes, has_modules=True)
    with pytest.raises(ConfigError, match="is_causal false"):
        LLM(str(path))
