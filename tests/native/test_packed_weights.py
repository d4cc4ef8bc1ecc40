"""Packed weights in the cache directory: a later start maps the bytes that an earlier one packed,
and whatever is wrong with a file costs its start the time of packing only.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import os
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from tiny_checkpoint import write_checkpoint

from quickstep.cli.main import main
from quickstep.config import EngineConfig, LoadConfig
from quickstep.engine.assembly import load_weights
from quickstep.engine.llm import LLM
from quickstep.engine.packed_weights import loading
from quickstep.engine.packed_weights.directory import FORMAT, PackedDirectory
from quickstep.errors import ConfigError
from quickstep.model.checkpoint import fingerprint as fingerprint_module
from quickstep.model.checkpoint.fingerprint import weights_fingerprint
from quickstep.ops.native.backend import load_native
from quickstep.ops.native.packed_files import NativePackedFiles, _Parts
from quickstep.ops.table import OpTable
from quickstep.sampling_params import SamplingParams

FORMS = [None, "int8", "int4"]
PROMPT = "def add(a, b):"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def table():
    found = load_native(2)
    assert found is not None
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of packed files; small models are kept too."""
    monkeypatch.setenv("QUICKSTEP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "_LEAST_BYTES", 0)
    return tmp_path / "cache" / "packed"


def written() -> None:
    """Wait for the thread that writes."""
    for thread in threading.enumerate():
        if thread.name == "packed-weights":
            thread.join()


def opened(model: str = "demo", **load: object) -> None:
    load_weights(EngineConfig(load=LoadConfig(model, **load)), None)
    written()


def answer(model: str = "demo", **options: object) -> tuple[object, ...]:
    with LLM(model, **options) as llm:
        sampling = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1)
        (output,) = llm.generate(PROMPT, sampling, use_tqdm=False)
        written()
        (found,) = output.outputs
        return tuple(found.token_ids), repr(found.logprobs)


def one_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WEIGHTS: dict[str, Callable[..., object]] = {
    "float32": lambda table, bias: table.pack_linear(random_tensor(77, 192), bias),
    "bfloat16": lambda table, bias: table.pack_linear(
        random_tensor(600, 190).bfloat16(), None if bias is None else bias.bfloat16()
    ),
    "float16": lambda table, bias: table.pack_linear(
        random_tensor(1, 192).half(), None if bias is None else bias[:1].half()
    ),
}
for name, form in {
    "int8": (8, None, False, False),
    "int8 groups": (8, 32, True, False),
    "int4": (4, None, False, False),
    "int4 groups": (4, 32, True, False),
    "int4 sub-scales": (4, 64, False, True),
}.items():

    def rounded(table, bias, form=form):
        return table.pack_quantized(table.quantize(random_tensor(150, 192), *form), bias)

    WEIGHTS[name] = rounded


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_mapped_weight_has_the_bytes_and_the_products(table, tmp_path, name, has_bias):
    num_outputs = {"float32": 77, "bfloat16": 600, "float16": 1}.get(name, 150)
    weight = WEIGHTS[name](table, random_tensor(num_outputs, seed=1) if has_bias else None)
    files = table.packed_files
    path = tmp_path / "weight"
    with path.open("wb") as file:
        file.write(bytes(files.page_bytes))
        for part in files.parts(weight):
            file.write(part)
            file.write(bytes(-len(part) % files.page_bytes))
    form = files.form(weight)
    with path.open("rb") as file:
        mapped = files.map(form, file.fileno(), files.page_bytes)
    path.unlink()  # the process keeps what it has mapped
    assert mapped is not None
    assert mapped.nbytes == weight.nbytes
    assert [bytes(part) for part in files.parts(mapped)] == [
        bytes(part) for part in files.parts(weight)
    ]
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name, torch.float32)
    for num_tokens in (1, 5, 40):
        x = random_tensor(num_tokens, form.k, seed=2).to(dtype)
        assert torch.equal(table.linear(x, mapped), table.linear(x, weight))


def test_every_byte_counts_for_the_checksum(table, tmp_path):
    files = table.packed_files
    weight = table.pack_linear(random_tensor(33, 64), random_tensor(33, seed=1))
    form = files.form(weight)
    content = b"".join(
        bytes(part) + bytes(-len(part) % files.page_bytes) for part in files.parts(weight)
    )
    path = tmp_path / "weight"
    starts = (0, files.page_bytes * -(-form.part_bytes[0] // files.page_bytes))
    places = [
        start + offset
        for start, size in zip(starts, form.part_bytes, strict=True)
        for offset in {*range(0, size, 97), size - 1}
    ]
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        with path.open("rb") as file:
            assert files.map(form, file.fileno(), 0) is None, place
    swapped = content[64:128] + content[:64] + content[128:]
    path.write_bytes(swapped)
    with path.open("rb") as file:
        assert files.map(form, file.fileno(), 0) is None


@pytest.mark.parametrize("quantization", FORMS)
def test_a_second_start_has_the_same_bits(folder, quantization, monkeypatch, caplog):
    first = answer(quantization=quantization)
    path = one_file(folder)
    assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    content = path.read_bytes()
    with caplog.at_level(logging.INFO, "quickstep"):
        assert answer(quantization=quantization) == first
    assert f"weights are mapped from {path}" in caplog.text
    assert path.read_bytes() == content
    monkeypatch.setenv("QUICKSTEP_CACHE_DIR", "")
    assert answer(quantization=quantization) == first


def test_a_later_start_knows_the_fingerprint(folder, monkeypatch):
    """It is read if its settings are the same; the file's name does not depend on all of them."""
    computed = []

    def counted(config, files, settings):
        computed.append(settings)
        return weights_fingerprint(config, files, settings)

    def fingerprint(**options: object) -> str:
        loaded = load_weights(EngineConfig(load=LoadConfig("demo"), **options), None)
        written()
        return loaded.model.fingerprint

    monkeypatch.setattr(fingerprint_module, "weights_fingerprint", counted)
    first = fingerprint()
    assert (fingerprint(), len(computed)) == (first, 1)
    longer = {"max_model_len": 8192, "allow_long_context": True}
    other = fingerprint(**longer)
    assert (other != first, len(computed)) == (True, 2)
    one_file(folder).unlink()
    assert (fingerprint(), fingerprint(**longer), len(computed)) == (first, other, 4)


def test_what_rounding_changed_is_said_again(folder, caplog):
    """A start that rounds nothing knows it from the file."""
    texts = []
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO, "quickstep"):
            opened(quantization="int4")
        texts.append([line for line in caplog.messages if "packed" not in line])
        texts[-1] = [line for line in texts[-1] if "mapped" not in line]
    assert texts[0] == texts[1]
    with one_file(folder).open("rb") as file:
        header, _ = FORMAT.read_header(file.fileno())
    assert any(entry.error for entry in header.weights)


def test_a_rank_has_a_file_of_its_part(folder, caplog):
    """The other rank is another process, which keeps no part of a model that is so small."""
    first = answer(num_threads=2)
    complete = one_file(folder)
    with caplog.at_level(logging.INFO, "quickstep"):
        assert answer(tensor_parallel_size=2, num_threads=2) == first
        (part,) = {*folder.iterdir()} - {complete}
        assert part.stat().st_size < complete.stat().st_size
        assert "weights are mapped" not in caplog.text
        assert answer(tensor_parallel_size=2, num_threads=2) == first
    assert f"weights are mapped from {part}" in caplog.text


@pytest.mark.parametrize("part", ["magic", "header", "first weight", "last byte"])
def test_a_changed_file_is_packed_again(folder, part, caplog):
    first = answer(quantization="int8")
    path = one_file(folder)
    with path.open("rb") as file:
        _, start = FORMAT.read_header(file.fileno())
    content = bytearray(path.read_bytes())
    # of a part's page, what is after its last byte is no part of it
    last = max(index for index, byte in enumerate(content) if byte)
    place = {"magic": 7, "header": 40, "first weight": start + 5, "last byte": last}[part]
    content[place] ^= 0x10
    path.write_bytes(content)
    assert answer(quantization="int8") == first
    assert "is not used" in caplog.text or "has changed" in caplog.text
    caplog.clear()
    assert answer(quantization="int8") == first  # writes it, or maps what the last start wrote
    with caplog.at_level(logging.INFO, "quickstep"):
        assert answer(quantization="int8") == first
    assert "weights are mapped" in caplog.text


@pytest.mark.parametrize("keep", [0, 10, 0.5, -1])
def test_a_file_that_was_cut_is_not_mapped(folder, keep, caplog):
    """Reading after its end would end the process."""
    first = answer()
    path = one_file(folder)
    size = path.stat().st_size
    os.truncate(path, int(size * keep) if keep == 0.5 else keep % size)
    assert answer() == first
    assert "is not used" in caplog.text


def test_another_checkpoint_is_another_file(folder, tmp_path):
    models = []
    for seed in (0, 1):
        model = tmp_path / f"model{seed}"
        write_checkpoint(model, seed=seed)
        models.append(model)
    opened(str(models[0]))
    assert len(list(folder.iterdir())) == 1
    opened(str(models[1]))
    assert len(list(folder.iterdir())) == 2
    # the same path, size and header, and other weights
    for file in models[1].glob("*.safetensors"):
        shutil.copyfile(file, models[0] / file.name)
    opened(str(models[0]))
    assert len(list(folder.iterdir())) == 3
    opened(str(models[0]), quantization="int8")
    assert len(list(folder.iterdir())) == 4


def test_the_least_recently_used_file_goes_first(folder):
    for quantization in FORMS:
        opened(quantization=quantization)
    sizes = {path: path.stat().st_size for path in folder.iterdir()}
    first, second, third = sorted(sizes, key=lambda path: path.stat().st_mtime_ns)
    opened()  # uses the first one
    bound = sizes[first] + sizes[second]
    opened(quantization="int8", packed_cache_bytes=bound)
    assert second.exists()  # a file that is there needs no room
    second.unlink()
    opened(quantization="int8", packed_cache_bytes=bound)
    assert sorted(folder.iterdir()) == sorted([first, second])
    assert not third.exists()


def test_nothing_is_kept_on_machines_with_other_pages(folder, monkeypatch):
    monkeypatch.setattr(mmap, "PAGESIZE", 65536)
    opened()
    assert not folder.exists()


def test_what_does_not_fit_is_not_kept(folder, caplog, monkeypatch):
    with caplog.at_level(logging.INFO, "quickstep"):
        opened(packed_cache_bytes=1000)
        assert "--packed-cache-bytes is 1000 bytes" in caplog.text
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, 10**8))
        opened()
        assert "of the disk are free" in caplog.text
    assert not list(folder.iterdir())


def test_nothing_is_kept_where_none_is_wanted(folder, monkeypatch):
    opened(packed_cache_bytes=0)
    assert not folder.exists()
    monkeypatch.setattr(loading, "_LEAST_BYTES", 1 << 40)
    opened()
    assert not folder.exists()  # nothing was computed for it
    monkeypatch.setattr(loading, "_LEAST_BYTES", 40 << 20)
    opened()
    assert not list(folder.iterdir())
    with pytest.raises(ConfigError, match="--packed-cache-bytes is -1"):
        LoadConfig("demo", packed_cache_bytes=-1)


def test_a_full_disk_costs_a_warning(folder, caplog, monkeypatch):
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FORMAT, "write", full)
    opened()
    assert "not kept for later starts: [Errno 28]" in caplog.text


@pytest.mark.parametrize("is_file", [False, True])
def test_a_directory_that_cannot_be_used_costs_a_warning(folder, caplog, is_file):
    folder.parent.mkdir()
    if is_file:
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o755)
    opened()
    assert "packed weights are not kept for later starts" in caplog.text
    assert "cannot be used" in caplog.text if is_file else "chmod 700" in caplog.text


def test_files_of_ended_writers_are_removed(folder):
    opened()
    ended = folder / f"{'0' * 32}.{2**22 + 1}.tmp"
    live = folder / f"{'1' * 32}.{os.getpid()}.tmp"
    for path in (ended, live):
        path.write_bytes(b"unfinished")
    PackedDirectory(folder, 1 << 30).prune(1 << 30)
    assert not ended.exists()
    assert live.exists()


def test_the_command_lists_and_removes(folder, capsys):
    for quantization in FORMS:
        opened(quantization=quantization)
    (folder / f"{'a' * 32}.packed").write_bytes(b"torn")
    assert main(["cache", "ls", "--format", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["model"] for entry in listed] == ["demo", "demo int8", "demo int4", ""]
    assert all(Path(entry["path"]).stat().st_size == entry["bytes"] for entry in listed)
    assert main(["cache", "ls"]) == 0
    text = capsys.readouterr().out
    assert "demo int4" in text and "(not readable)" in text
    kept = sum(entry["bytes"] for entry in listed[2:])
    assert main(["cache", "prune", "--to", str(kept), "--format", "json"]) == 0
    removed = json.loads(capsys.readouterr().out)
    assert [entry["model"] for entry in removed] == ["demo", "demo int8"]
    assert main(["cache", "prune", "--to", "0"]) == 0
    assert not list(folder.iterdir())


@pytest.mark.parametrize("arguments", [["prune"], ["ls", "--to", "8G"]])
def test_the_command_needs_what_it_does(folder, arguments, capsys):
    assert main(["cache", *arguments]) == 2
    assert "prune needs --to SIZE" in capsys.readouterr().err


def checksum(table: OpTable, *parts: bytes) -> int:
    """Of some bytes as the parts of a weight."""
    assert isinstance(table.packed_files, NativePackedFiles)
    buffers = [ctypes.create_string_buffer(part, len(part)) for part in parts]
    call = _Parts()
    for place, buffer in enumerate(buffers):
        call.memory[place] = ctypes.addressof(buffer)
        call.bytes[place] = len(buffer)
    return table.packed_files._checksum(call)


@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 130, 1023, 1100])
def test_bytes_of_any_number_count_for_the_checksum(table: OpTable, size: int) -> None:
    """Also those after the last complete stripe, and how many there are."""
    sound = Random(size).randbytes(size)
    found = {checksum(table, part) for part in (sound, sound + b"\0")}
    found.add(checksum(table, sound, b"\0"))
    for place in range(size):
        changed = bytearray(sound)
        changed[place] ^= 1 << place % 8
        found.add(checksum(table, bytes(changed)))
    assert len(found) == 3 + size


def test_the_places_of_pieces_count_for_the_checksum(table: OpTable) -> None:
    first, second, third = (Random(seed).randbytes(1 << 18) for seed in range(3))
    orders = [(first, second, third), (second, first, third), (first, third, second)]
    found = {checksum(table, b"".join(pieces)) for pieces in orders}
    found |= {
        checksum(table, *parts) for parts in ((first + second, third), (third, first + second))
    }
    assert len(found) == 5
