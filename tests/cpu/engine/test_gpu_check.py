"""`--kernels auto` on a GPU, and the check that it relies on, without a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from quickstep.cli import doctor
from quickstep.errors import ConfigError
from quickstep.ops import gpu_checks, resolve
from quickstep.ops.gpu_checks import StoredGpuCheck, gpu_check_key, read_gpu_check, write_gpu_check
from quickstep.ops.reference import reference_ops
from quickstep.ops.tensors import Device, to_torch
from quickstep.verify import gpu_check
from quickstep.verify.gpu_check import CheckedFormat, PartResult, check_kernels

GPU = Device("cuda", 0)
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
}
FORMAT = CheckedFormat("tiny", TINY, dtype="float32")


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("QUICKSTEP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")


@pytest.mark.usefixtures("a_gpu")
def test_auto_uses_triton_where_its_check_has_passed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = gpu_check_key(0)
    assert resolve.resolve_ops(GPU).name == "reference"
    assert "run `quickstep doctor --gpu-check` once" in caplog.text
    write_gpu_check(StoredGpuCheck(key, ("int4: bits: 3 of 60 differ",)))
    assert resolve.resolve_ops(GPU).name == "reference"
    assert "failed `quickstep doctor --gpu-check` on this GPU: int4: bits: 3 of 60" in caplog.text
    path = write_gpu_check(StoredGpuCheck(key, ()))
    caplog.clear()
    assert resolve.resolve_ops(GPU).name == "triton"
    assert not caplog.records
    monkeypatch.setattr(gpu_checks, "_digest_of", lambda _: "other kernels")
    assert resolve.resolve_ops(GPU).name == "reference"
    monkeypatch.undo()
    assert path is not None
    path.write_text("{")
    assert read_gpu_check(key, path.parent.parent) is None


@pytest.mark.usefixtures("a_gpu")
def test_nothing_is_stored_without_a_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUICKSTEP_CACHE_DIR", "")
    key = gpu_check_key(0)
    assert write_gpu_check(StoredGpuCheck(key, ())) is None
    assert read_gpu_check(key) is None


@pytest.mark.usefixtures("a_gpu")
def test_the_command_stores_what_it_found_for_each_model_of_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [PartResult("bf16: agreement", "1e-3", True), PartResult("bf16: bits", "0 of 60", True)]
    monkeypatch.setattr(gpu_check, "check_kernels", lambda *_: iter(parts))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    assert doctor.run(SimpleNamespace(gpu_check=True, json=False)) == 0
    assert capsys.readouterr().err.count("ok  bf16: bits: 0 of 60") == 1, "both are the same model"
    assert read_gpu_check(gpu_check_key(0)) == StoredGpuCheck(gpu_check_key(0), ())
    parts[1] = replace(parts[1], has_passed=False)
    assert doctor.run(SimpleNamespace(gpu_check=True, json=True)) == 1
    assert '"has_passed": false' in capsys.readouterr().out
    stored = read_gpu_check(gpu_check_key(0))
    assert stored is not None and stored.failures == ("bf16: bits: 0 of 60",)


def test_the_command_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="needs a GPU"):
        doctor.run(SimpleNamespace(gpu_check=True, json=False))


def test_the_check_passes_for_right_kernels_and_names_what_wrong_ones_break() -> None:
    ops, device = reference_ops(), torch.device("cpu")

    def outcomes(table: object) -> list[bool]:
        return [one.has_passed for one in check_kernels(table, device, (FORMAT,), 3)]

    assert outcomes(ops) == [True, True]

    def half(x, weight):  # type: ignore[no-untyped-def]
        return ops.linear(x, weight) * 0.5

    assert outcomes(replace(ops, linear=half)) == [False, True]

    def by_batch(x, weight):  # type: ignore[no-untyped-def]
        return ops.linear(x, weight) * (1.0 + 1e-5 * (to_torch(x).shape[0] % 7))

    assert outcomes(replace(ops, linear=by_batch)) == [True, False]

    def broken(x, weight):  # type: ignore[no-untyped-def]
        raise RuntimeError("illegal memory access")

    parts = list(check_kernels(replace(ops, linear=broken), device, (FORMAT,), 3))
    assert [part.detail for part in parts] == ["RuntimeError: illegal memory access"] * 2
    assert [part.name for part in parts] == ["tiny: agreement", "tiny: bits"]


def test_interpreted_kernels_agree_with_the_reference() -> None:
    pytest.importorskip("triton")
    from quickstep.ops.triton.backend import load_triton

    ops = load_triton(torch.device("cpu"))
    assert ops is not None
    model = replace(FORMAT, config={**TINY, "max_position_embeddings": 64})
    first = next(iter(check_kernels(ops, torch.device("cpu"), (model,), 1)))
    assert first.has_passed, first
