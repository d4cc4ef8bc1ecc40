"""Encoders of three families against transformers: states, poolings, heads, batches."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_encoders import FAMILIES, write_encoder

from quickstep import LLM
from quickstep.errors import ConfigError, RequestError
from quickstep.types import Pooling

TEXTS = ["cats", "a text that is longer than the windows of local layers are", "Dogs and cats", "x"]


def states(reference: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return reference(torch.tensor([ids])).last_hidden_state[0]


def normalised(state: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(state, dim=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_transformers_in_every_batch(tmp_path: Path, family: str) -> None:
    reference = write_encoder(tmp_path, family)
    with LLM(str(tmp_path), num_threads=1) as llm:
        encode = llm.get_tokenizer().encode
        assert encode("cats")[0] == 2 and encode("cats")[-1] == 3
        assert llm.engine.retrieval.pooling is Pooling.CLS
        for pooling, pool in (
            (None, lambda hidden: hidden[0]),
            (Pooling.MEAN, lambda hidden: hidden.mean(0)),
            (Pooling.LAST, lambda hidden: hidden[-1]),
        ):
            texts = [*TEXTS, "a [SEP] in a text"]  # which is no pair
            outputs = llm.embed(texts, use_tqdm=False, pooling=pooling)
            for text, output in zip(texts, outputs, strict=True):
                expected = normalised(pool(states(reference, encode(text))))
                found = torch.tensor(output.outputs.embedding)
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
                [alone] = llm.embed(text, use_tqdm=False, pooling=pooling)
                assert alone.outputs == output.outputs
        assert all(output.num_cached_tokens == 0 for output in outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_that_cannot_hold_all_texts_takes_complete_ones(tmp_path: Path, family: str) -> None:
    write_encoder(tmp_path, family)
    texts = ["abc " * 18, "def " * 15, "gh", "ijk " * 19]
    with LLM(str(tmp_path), num_threads=1) as llm:
        expected = [output.outputs for output in llm.embed(texts, use_tqdm=False)]
    with LLM(str(tmp_path), num_threads=1, max_num_batched_tokens=8, max_num_seqs=3) as llm:
        assert llm.engine.max_model_len == 80
        outputs = llm.embed(texts, use_tqdm=False)
        assert [output.outputs for output in outputs] == expected
        with pytest.raises(RequestError, match="prompt is too long"):
            llm.embed("abc " * 40)


def test_an_encoder_generates_nothing_and_says_so(tmp_path: Path) -> None:
    write_encoder(tmp_path, "Bert")
    with LLM(str(tmp_path), num_threads=1) as llm:
        with pytest.raises(RequestError, match="is an encoder"):
            llm.generate("a")
        with pytest.raises(RequestError, match="no classification head"):
            llm.embed("a", pooling=Pooling.CLASSES)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("labels", [1, 3])
def test_heads_are_those_of_transformers(tmp_path: Path, family: str, labels: int) -> None:
    reference = write_encoder(tmp_path, family, "ForSequenceClassification", num_labels=labels)
    with LLM(str(tmp_path), num_threads=1) as llm:
        encode = llm.get_tokenizer().encode
        outputs = llm.classify(TEXTS, use_tqdm=False)
        for text, output in zip(TEXTS, outputs, strict=True):
            with torch.no_grad():
                [logits] = reference(torch.tensor([encode(text)])).logits
            expected = torch.sigmoid(logits) if labels == 1 else torch.softmax(logits, 0)
            assert output.outputs.probs == pytest.approx(expected.tolist(), abs=1e-5)
            assert output.outputs.num_classes == labels
        if labels == 3:
            with pytest.raises(RequestError, match="3 classes"):
                llm.score("a", "b")
            return
        for document, output in zip(TEXTS, llm.score("pets", TEXTS, use_tqdm=False), strict=True):
            ids = list(output.prompt_token_ids)
            first = ids.index(3) + 1
            assert ids == [*encode("pets"), *encode(document)[1:]]
            segments = [0] * first + [1] * (len(ids) - first)
            kinds = {"token_type_ids": torch.tensor([segments])} if family == "Bert" else {}
            with torch.no_grad():
                [[logit]] = reference(torch.tensor([ids]), **kinds).logits
            assert output.outputs.score == pytest.approx(torch.sigmoid(logit).item(), abs=1e-5)
        with pytest.raises(RequestError, match="no embeddings"):
            llm.embed("a")


def test_norms_by_the_names_of_tensorflow_are_read(tmp_path: Path) -> None:
    reference = write_encoder(tmp_path, "Bert")
    file = tmp_path / "model.safetensors"
    older = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta"): value
        for name, value in load_file(file).items()
    }
    save_file(older, file)
    with LLM(str(tmp_path), num_threads=1) as llm:
        [output] = llm.embed("cats", use_tqdm=False)
        expected = normalised(states(reference, llm.get_tokenizer().encode("cats"))[0])
        found = torch.tensor(output.outputs.embedding)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_the_longest_text_is_that_of_the_card(tmp_path: Path) -> None:
    write_encoder(tmp_path, "Bert")
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 16}))
    with LLM(str(tmp_path), num_threads=1) as llm:
        assert llm.engine.max_model_len == 16


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "silu"}, "hidden_act"),
        ({"num_hidden_layers": 9}, r"no tensor .*encoder\.layer\.4"),
        ({"intermediate_size": 49}, r"intermediate.*\[48, 32\]"),
    ],
)
def test_what_is_not_implemented_or_damaged_is_named(
    tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    write_encoder(tmp_path, "Bert")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=why):
        LLM(str(tmp_path), num_threads=1)


def test_quantization_and_adapters_are_refused(tmp_path: Path) -> None:
    write_encoder(tmp_path, "Bert")
    with pytest.raises(ConfigError, match="is an encoder"):
        LLM(str(tmp_path), num_threads=1, quantization="int8")
    with pytest.raises(ConfigError, match="BertModel"):
        LLM(str(tmp_path), num_threads=1, enable_lora=True)
