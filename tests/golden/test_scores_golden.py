"""Scores and embeddings of a tiny checkpoint with sentence-transformers files, against a dense
forward of transformers.
"""

import json
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import write_checkpoint
from transformers import LlamaForCausalLM

from quickstep import LLM
from quickstep.errors import RequestError
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
