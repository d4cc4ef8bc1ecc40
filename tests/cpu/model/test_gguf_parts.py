"""GGUF files in parts, and which file of a folder or a repository a name means."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import gguf_files as files
import huggingface_hub
import pytest
from gguf_models import VOCAB, write_model
from huggingface_hub.errors import DryRunError

from quickstep import LLM, SamplingParams
from quickstep.config import LoadConfig
from quickstep.errors import ConfigError
from quickstep.model.checkpoint import gguf_file
from quickstep.model.checkpoint.gguf_file import open_gguf
from quickstep.model.checkpoint.gguf_names import choose_gguf, gguf_models, gguf_parts
from quickstep.model.checkpoint.source import file_versions, find_checkpoint
from quickstep.model.checkpoint.weights import open_checkpoint_files
from quickstep.model.spec import read_config
from quickstep.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("one") / "tiny-q4_k_m.gguf"
    write_model(path)
    return path


@pytest.fixture
def in_parts(one_file: Path, tmp_path: Path) -> Path:
    """The first of three files with the same tensors, written by ggml's package."""
    writer = gguf.GGUFWriter(tmp_path / "tiny-Q4_K_M.gguf", "llama", split_max_tensors=8)
    for key, value in (files.sizes() | files.byte_vocabulary(VOCAB)).items():
        files.add_metadata(writer, f"llama{key}" if key.startswith(".") else key, value)
    for tensor in gguf.GGUFReader(one_file).tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first, *others = sorted(tmp_path.glob("*.gguf"))
    assert len(others) == 2
    return first


def _answer(path: Path) -> list[int]:
    with LLM(str(path), dtype="float32") as llm:
        (answer,) = llm.generate(["abc"], SamplingParams(temperature=0.0, max_tokens=8))
    return list(answer.outputs[0].token_ids)


def test_any_part_of_a_file_is_the_model(one_file: Path, in_parts: Path) -> None:
    expected = _answer(one_file)
    for path in (*gguf_parts(in_parts), in_parts.parent):
        assert _answer(path) == expected
    found = find_checkpoint(LoadConfig(model=str(gguf_parts(in_parts)[2])))
    assert found.name == "tiny-Q4_K_M"
    assert len(file_versions(found.path)) == 3
    assert set(open_gguf(found.path).tensors) == set(open_gguf(one_file).tensors)


def test_a_missing_part_is_one_sentence(in_parts: Path) -> None:
    first, second, third = gguf_parts(in_parts)
    second.unlink()
    for path in (first, third):
        with pytest.raises(ConfigError, match=f"one of 3 parts, and {second.name} is missing"):
            open_gguf(path)
    with pytest.raises(ConfigError, match="is missing"):
        open_gguf(find_checkpoint(LoadConfig(model=str(first.parent))).path)


def test_parts_that_do_not_belong_together_are_refused(in_parts: Path) -> None:
    first, second, third = gguf_parts(in_parts)
    third.write_bytes(second.read_bytes())
    with pytest.raises(ConfigError, match=r"says that it is part 1 of 3.*name says 2 of 3"):
        open_gguf(first)
    with pytest.raises(ConfigError, match=r"one of 3 parts.*NAME-00001-of-00003.gguf"):
        open_gguf(first.rename(first.with_name("renamed.gguf")))


REPOSITORY = (
    "README.md",
    "config.json",
    "imatrix_unsloth.gguf",
    "mmproj-F16.gguf",
    "mtp-Tiny-Q4_K_M.gguf",
    "Tiny-UD-Q4_K_M.gguf",
    "Tiny-Q4_K_M.gguf",
    "Tiny-Q4_K_S.gguf",
    "Tiny-Q8_0.gguf",
    "Tiny.IQ4_XS.gguf",
    "BF16/Tiny-BF16-00001-of-00002.gguf",
    "BF16/Tiny-BF16-00002-of-00002.gguf",
    "Tiny-UD-Q2_K_XL.gguf",
)
BF16_PARTS = REPOSITORY[10:12]


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("", ("Tiny-Q4_K_M.gguf",)),
        ("Q4_K_M", ("Tiny-Q4_K_M.gguf",)),
        ("q8_0", ("Tiny-Q8_0.gguf",)),
        ("UD-Q4_K_M", ("Tiny-UD-Q4_K_M.gguf",)),
        ("Q2_K_XL", ("Tiny-UD-Q2_K_XL.gguf",)),
        ("IQ4_XS", ("Tiny.IQ4_XS.gguf",)),
        ("BF16", BF16_PARTS),
        ("Tiny-Q4_K_S.gguf", ("Tiny-Q4_K_S.gguf",)),
    ],
)
def test_a_tag_names_the_files_of_one_model(tag: str, expected: tuple[str, ...]) -> None:
    models = gguf_models(REPOSITORY)
    assert choose_gguf(models, "org/tiny-GGUF", tag) == expected
    assert models.left_out == (
        "imatrix_unsloth.gguf",
        "mmproj-F16.gguf",
        "mtp-Tiny-Q4_K_M.gguf",
    )


def test_without_a_tag_it_is_q4_k_m_then_q8_0_then_the_only_one() -> None:
    without = [name for name in REPOSITORY if "Q4_K_M" not in name]
    assert choose_gguf(gguf_models(without), "o/r") == ("Tiny-Q8_0.gguf",)
    assert choose_gguf(gguf_models(["gpt-oss-20b-mxfp4.gguf"]), "o/r") == (
        "gpt-oss-20b-mxfp4.gguf",
    )


@pytest.mark.parametrize(
    ("names", "tag", "match"),
    [
        (REPOSITORY, "Q3_K_M", "no GGUF file of the tag Q3_K_M.*BF16, IQ4_XS, Q4_K_M, Q4_K_S"),
        (REPOSITORY, "M", "no GGUF file of the tag M"),
        (("a-F16.gguf", "a-Q5_0.gguf"), "", "has 2 models.*o/r:TAG, of the tags F16, Q5_0"),
        (("mmproj.gguf", "x.bin"), "", "neither a config.json nor a GGUF file"),
        (("config.json", "x.safetensors"), "Q8_0", "o/r has no GGUF file of a model"),
    ],
)
def test_a_tag_that_is_not_there_lists_those_that_are(
    names: tuple[str, ...], tag: str, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        choose_gguf(gguf_models(names), "o/r", tag)


@pytest.mark.parametrize("reached", [True, False], ids=["hub", "cache"])
def test_a_hub_name_with_a_tag_gets_only_the_files_of_the_tag(
    reached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[object] = []

    def snapshot(
        name: str, *, allow_patterns: object, dry_run: bool = False, **_: object
    ) -> object:
        assert name == "org/tiny-GGUF"
        if dry_run and not reached:
            raise DryRunError("no connection")
        if dry_run:
            return [SimpleNamespace(filename=file) for file in REPOSITORY if file.endswith("gguf")]
        requested.append(allow_patterns)
        return str(tmp_path)

    for file in BF16_PARTS if not reached else ():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    found = find_checkpoint(LoadConfig(model="org/tiny-GGUF:BF16"))
    assert (found.path, found.name) == (tmp_path / BF16_PARTS[0], "org/tiny-GGUF:BF16")
    assert requested[-1] == list(BF16_PARTS)
    assert found.left_out == (gguf_models(REPOSITORY).left_out if reached else ())


def test_a_repository_without_a_config_is_one_of_gguf_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny-Q8_0.gguf").write_bytes(b"")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    found = find_checkpoint(LoadConfig(model="org/tiny", offline=True))
    assert found.path == tmp_path / "tiny-Q8_0.gguf"


def test_a_link_in_the_cache_of_the_hub_keeps_its_name(one_file: Path, tmp_path: Path) -> None:
    link = tmp_path / "tiny-Q4_K_M.gguf"
    (tmp_path / "0123abcd").write_bytes(one_file.read_bytes())
    link.symlink_to(tmp_path / "0123abcd")
    assert find_checkpoint(LoadConfig(model=str(link))).path == link


def test_a_header_is_read_once_unless_the_file_changes(
    one_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reads = tmp_path / "model.gguf", []
    monkeypatch.setattr(gguf_file, "_read_header", partial(_noted, gguf_file._read_header, reads))
    content = one_file.read_bytes()

    def written(content: bytes, time_s: float) -> None:
        path.write_bytes(content)
        os.utime(path, (time_s, time_s))

    written(content, 1e9)
    name = open_gguf(path).metadata["general.architecture"]
    assert name == "llama"
    assert open_gguf(path) is open_gguf(path)
    assert read_config(path) == read_config(path)
    assert read_config(path) is not read_config(path)  # it may be changed
    assert open_checkpoint_files(path) is open_checkpoint_files(path)
    assert Tokenizer.open(path).vocab_size
    assert len(reads) == 1
    written(content.replace(b"llama", b"qwen2"), 1e9 + 1)
    assert open_gguf(path).metadata["general.architecture"] == "qwen2"
    assert len(reads) == 2
    # within a tick of the clock a change would not be seen
    path.write_bytes(content)
    assert open_gguf(path).metadata["general.architecture"] == "llama"
    path.write_bytes(content.replace(b"llama", b"qwen2"))
    assert open_gguf(path).metadata["general.architecture"] == "qwen2"
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        open_gguf(path)


def _noted(read: Any, reads: list[Path], path: Path) -> Any:
    reads.append(path)
    return read(path)
