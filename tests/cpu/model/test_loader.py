"""Loading checkpoints: every kind of broken file is refused in a sentence that names it."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quickstep.config import LoadConfig
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.placement import choose_device, choose_dtype
from quickstep.model.checkpoint.safetensors_files import open_tensor_files
from quickstep.model.checkpoint.source import Checkpoint
from quickstep.model.checkpoint.tensor_schema import layer_tensors, outer_tensors
from quickstep.model.decoder import Decoder
from quickstep.model.interface import Model
from quickstep.model.loader import load_model
from quickstep.model.spec import read_spec
from quickstep.ops.table import OpTable
from quickstep.ops.tensors import Device, torch_device
from quickstep.ops.weights import LinearWeight

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
QUERY = "model.layers.0.self_attn.q_proj.weight"


def write_checkpoint(path: Path, **changes: object) -> dict[str, Tensor]:
    """A seeded tiny Llama; gives its tensors."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes), encoding="utf-8")
    spec = read_spec(path)
    shapes = outer_tensors(spec, "model.", "lm_head.weight")
    for index in range(spec.num_layers):
        shapes |= layer_tensors(spec, "model.", index)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors")
    return tensors


def no_op(*_: object) -> Tensor:
    raise AssertionError("loading runs no op but pack_linear")


def ops(name: str = "packing-only") -> OpTable:
    def pack(weight: Tensor, bias: Tensor | None) -> LinearWeight:
        return LinearWeight(weight, bias, weight.shape[0], weight.shape[1], weight.nbytes)

    return OpTable(name, pack, *[no_op] * 14, scratch_bytes=0)


def load(path: Path, dtype: str = "auto", table: OpTable | None = None, **options: object) -> Model:
    config = LoadConfig(model=str(path), dtype=dtype, device="cpu")
    checkpoint = Checkpoint(path, path.name)
    return load_model(checkpoint, read_spec(path), table or ops(), config, **options)


def decoder(path: Path, dtype: str = "auto") -> Decoder:
    model = load(path, dtype)
    assert isinstance(model, Decoder)
    return model


def test_fused_projections_hold_the_stored_parts_in_order(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    start = "model.layers.1.self_attn."
    parts = [tensors[f"{start}{part}_proj.weight"] for part in "qkv"]
    loaded = decoder(tmp_path).weights.layers[1].mixer.qkv
    assert torch.equal(loaded.data, torch.cat(parts))
    assert (loaded.num_outputs, loaded.num_inputs) == (48, 16)


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    seen: list[tuple[int, int]] = []
    load(tmp_path, progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_take_the_dtype_that_was_requested(dtype: str, tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    wanted = getattr(torch, dtype)
    model = decoder(tmp_path, dtype)
    assert model.kv_layout.dtype is wanted
    assert torch.equal(model.weights.final_norm, tensors["model.norm.weight"].to(wanted))


def test_auto_dtype_is_the_configs_then_the_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", torch_dtype="bfloat16")
    assert load(tmp_path / "a").kv_layout.dtype is torch.bfloat16
    tensors = write_checkpoint(tmp_path / "b")
    halves = {name: tensor.half() for name, tensor in tensors.items()}
    save_file(halves, tmp_path / "b" / "model.safetensors")
    assert load(tmp_path / "b").kv_layout.dtype is torch.float16
    with pytest.raises(ConfigError, match="int3"):
        choose_dtype("int3", read_spec(tmp_path / "a"))


def test_an_unknown_or_absent_device_is_refused() -> None:
    for name in ("tpu", "cuda:", "cuda:one", "cuda:-1", "CPU"):
        with pytest.raises(ConfigError, match=f"'{name}'"):
            choose_device(name)
    if not torch.cuda.is_available():
        for name in ("cuda", "cuda:0", "cuda:7"):
            with pytest.raises(ConfigError, match=f"{name} and torch sees no GPU"):
                choose_device(name)


def test_one_of_several_gpus_is_chosen_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda") == Device("cuda")
    assert choose_device("cuda:1") == Device("cuda", 1)
    assert torch_device(choose_device("cuda:1")) == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="cuda:2 and torch sees 2 GPUs"):
        choose_device("cuda:2")


def test_position_tables_cover_the_length_that_was_requested(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    assert load(tmp_path).max_model_len == 64
    assert load(tmp_path, max_model_len=10).max_model_len == 10
    assert load(tmp_path, max_model_len=1000).max_model_len == 64


def test_a_tied_model_needs_no_head_and_keeps_one_that_differs(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, tie_word_embeddings=True)
    model = decoder(tmp_path)
    assert torch.equal(model.weights.lm_head.data, tensors["model.embed_tokens.weight"])
    head = torch.ones(32, 16)
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    assert torch.equal(decoder(tmp_path).weights.lm_head.data, head)


def test_old_position_buffers_are_ignored(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    load(tmp_path)


def edit(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = write_checkpoint(path)
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(QUERY), f"{QUERY!r} is missing"),
        (lambda t: [t.pop(k) for k in list(t) if "layers.1" in k], "9 tensors"),
        (lambda t: t.update({QUERY: torch.ones(16, 17)}), r"shape \[16, 17\].*\[16, 16\]"),
        (lambda t: t.update(extra=torch.ones(1)), "'extra' is not part"),
        (lambda t: t.update({QUERY: torch.ones(16, 16, dtype=torch.int8)}), "stored as I8"),
    ],
)
def test_tensors_that_differ_from_the_architecture_are_named(
    change: Callable[[dict[str, Tensor]], object], named: str, tmp_path: Path
) -> None:
    edit(tmp_path, change)
    with pytest.raises(ConfigError, match=named):
        load(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_truncated_file_is_refused(kept: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ConfigError, match="truncated or corrupt"):
        load(tmp_path)


def _entry(dtype: str, shape: list[int], offsets: list[int]) -> bytes:
    header = json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 64,
        (8).to_bytes(8, "little") + b"nonsense",
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + b'{"a": {}}',
        (8).to_bytes(8, "little") + b'{"a": 1}',
        (4000).to_bytes(8, "little") + b" " * 3999 + b"\xff",
        _entry("F32", [2**70], [0, 2**72]),
        _entry("F32", [1] * 500, [0, 4]),
        _entry("F32", [True], [0, 4]),
    ],
)
def test_a_corrupt_header_is_refused(content: bytes, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="truncated or corrupt") as caught:
        load(tmp_path)
    assert len(str(caught.value)) < 400


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with (tmp_path / "model.safetensors").open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(ConfigError, match="4 bytes follow"):
        load(tmp_path)


def write_index(path: Path, files: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    write_index(tmp_path, {"a": "model.safetensors", "b": "model-00002.safetensors"})
    with pytest.raises(ConfigError, match=r"model-00002\.safetensors is missing"):
        load(tmp_path)


def test_a_shard_outside_of_the_directory_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    write_index(tmp_path, {"a": "../elsewhere.safetensors"})
    with pytest.raises(ConfigError, match="outside"):
        load(tmp_path)


def test_a_broken_index_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match="not a safetensors index"):
        load(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    save_file({QUERY: tensors[QUERY]}, tmp_path / "second.safetensors")
    write_index(tmp_path, {"a": "model.safetensors", "b": "second.safetensors"})
    with pytest.raises(ConfigError, match=QUERY):
        load(tmp_path)


@pytest.mark.parametrize("place", ["model.safetensors", "second.safetensors"])
def test_the_index_decides_which_of_two_copies_counts(place: str, tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    copies = {"model.safetensors": tensors[QUERY], "second.safetensors": tensors[QUERY] + 1}
    save_file({QUERY: copies["second.safetensors"]}, tmp_path / "second.safetensors")
    others = dict.fromkeys(tensors, "model.safetensors")
    write_index(tmp_path, others | {"a": "second.safetensors", QUERY: place})
    loaded = decoder(tmp_path).weights.layers[0].mixer.qkv
    assert torch.equal(loaded.data[:16], copies[place])


STORED_TYPES = """
    BOOL U8 I8 I16 U16 I32 U32 I64 U64 F16 BF16 F32 F64 C64 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ
    F8_E5M2FNUZ F4 F6_E2M3 F6_E3M2 F8_E3M4 I4
"""


def test_an_index_of_files_that_are_gone_does_not_hide_the_whole_file(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    write_index(tmp_path, dict.fromkeys(tensors, "model-00001-of-00002.safetensors"))
    load(tmp_path)


def write_header(path: Path, entries: dict[str, object], num_bytes: int) -> Path:
    text = json.dumps(entries).encode()
    file = path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))
    return file


@pytest.mark.parametrize("dtype", STORED_TYPES.split())
@pytest.mark.parametrize("num_bytes", [3, 6, 8, 64])
def test_a_header_is_corrupt_only_where_the_library_refuses_it(
    dtype: str, num_bytes: int, tmp_path: Path
) -> None:
    """The empty tensor is written after the one at whose beginning it is."""
    entry = {"dtype": dtype, "shape": [8], "data_offsets": [0, num_bytes]}
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    file = write_header(tmp_path, {"a": entry, "z": empty}, num_bytes)
    try:
        with safe_open(file, "np") as opened:
            names = set(opened.keys())
    except SafetensorError:
        with pytest.raises(ConfigError) as caught:
            open_tensor_files(tmp_path)
        is_known = dtype not in ("F8_E3M4", "I4")
        assert is_known or f"tensor 'a' as '{dtype}'" in str(caught.value)
        return
    assert set(open_tensor_files(tmp_path).tensors) == names


LEFTOVERS = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": (8,),
    "model.layers.1.self_attn.rotary_emb.cos_cached": (1, 1, 8, 16),
    "model.rotary_emb.inv_freq": (8,),
    "model.layers.0.self_attn.masked_bias": (),
    "model.layers.0.self_attn.bias": (1, 1, 8, 8),
    "model.layers.0.mlp.up_proj._extra_state": (0,),
    "model.layers.2.mlp.up_proj.weight": (24, 16),
    "v_head.summary.weight": (1, 16),
    "score.weight": (3, 16),
    "medusa_head.0.0.linear.weight": (16, 16),
    "mtp.fc.weight": (16, 32),
}
PARTS = {
    "lm_head.bias": (32,),
    "model.layers.0.self_attn.q_proj.bias": (16,),
    "model.layers.0.self_attn.q_norm.weight": (8,),
    "model.layers.1.mlp.gate.weight": (4, 16),
    "model.embed_positions.weight": (64, 16),
    "logit_scale": (1,),
    "model.layers.0.self_attn.q_proj.lora_A.weight": (4, 16),
}


@pytest.mark.parametrize("name", LEFTOVERS)
def test_what_computes_nothing_is_not_read(name: str, tmp_path: Path) -> None:
    edit(tmp_path, lambda tensors: tensors.update({name: torch.zeros(LEFTOVERS[name])}))
    load(tmp_path)


@pytest.mark.parametrize("name", PARTS)
def test_what_could_compute_something_is_refused_by_name(name: str, tmp_path: Path) -> None:
    edit(tmp_path, lambda tensors: tensors.update({name: torch.zeros(PARTS[name])}))
    with pytest.raises(ConfigError, match=re.escape(f"tensor {name!r} is not part of")):
        load(tmp_path)


def test_pickle_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="convert them to safetensors"):
        load(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no weights"):
        load(tmp_path)


def test_fingerprint_names_weights_config_dtype_and_kernels(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a")
    first = load(tmp_path / "a").fingerprint
    assert load(tmp_path / "a").fingerprint == first
    write_checkpoint(tmp_path / "b", rope_theta=20_000.0)
    edit(tmp_path / "c", lambda tensors: tensors[QUERY][3, 5].add_(1e-3))
    others = [
        load(tmp_path / "b").fingerprint,
        load(tmp_path / "c").fingerprint,
        load(tmp_path / "a", "bfloat16").fingerprint,
        load(tmp_path / "a", table=ops("other")).fingerprint,
    ]
    assert len({first, *others}) == 5


def test_loading_never_holds_two_copies_of_the_model(tmp_path: Path) -> None:
    """What was read is gone once it is packed: at each packing only one source is alive."""
    write_checkpoint(tmp_path, num_hidden_layers=6)
    sources: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def pack(weight: Tensor, bias: Tensor | None) -> LinearWeight:
        sources.append(weakref.ref(weight))
        alive.append(sum(source() is not None for source in sources))
        return LinearWeight(weight.clone(), bias, weight.shape[0], weight.shape[1], weight.nbytes)

    load(tmp_path, table=replace(ops(), pack_linear=pack))
    assert len(alive) == 6 * 4 + 1
    assert max(alive) == 1


@examples(100)
@given(st.integers(0, 1_000_000), st.integers(0, 255), st.booleans())
def test_a_damaged_byte_is_refused_or_changes_nothing_else(
    where: int, value: int, cut: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        save_file({"a": torch.ones(3, 2), "b": torch.ones(4)}, path / "model.safetensors")
        content = bytearray((path / "model.safetensors").read_bytes())
        where %= len(content)
        content[where] = value
        (path / "model.safetensors").write_bytes(content[: where + 1] if cut else content)
        with contextlib.suppress(ConfigError):
            files = open_tensor_files(path)
            for name, tensor in files.tensors.items():
                files.read_into(name, memoryview(bytearray(tensor.nbytes)))
