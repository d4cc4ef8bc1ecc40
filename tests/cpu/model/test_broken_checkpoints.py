"""A checkpoint that is damaged or differs from its architecture: one sentence, whatever it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_checkpoint
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quickstep.config import EngineConfig, LoadConfig
from quickstep.engine.assembly import describe, load_weights
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.source import find_checkpoint
from quickstep.model.decoder import Decoder
from quickstep.model.eagle import load_eagle, read_eagle_spec
from quickstep.model.loader import load_model
from quickstep.model.spec import read_spec
from quickstep.ops.resolve import resolve_ops
from quickstep.runtime.speculation.medusa import load_medusa

Tensors = dict[str, Tensor]
NAMES = sorted(tiny_checkpoint._weights(0))


def load(path: Path) -> None:
    """What `open_engine` and the engine read of a checkpoint."""
    options = LoadConfig(model=str(path), device="cpu", num_threads=1)
    loaded = describe(load_weights(EngineConfig(load=options), None), 0.0)
    assert loaded.chat_template is None or loaded.chat_template.source


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny_checkpoint.write_checkpoint(tmp_path / "tiny")


def rewrite(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_the_checkpoint_that_is_damaged_below_loads(checkpoint: Path) -> None:
    load(checkpoint)


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_is_lost_renamed_or_of_another_form_is_named(
    name: str, checkpoint: Path
) -> None:
    whole = load_file(checkpoint / "model.safetensors")
    module = name.removesuffix(".weight")
    wide = torch.zeros((*whole[name].shape[:-1], whole[name].shape[-1] + 1))
    changes: dict[str, Tensors] = {
        "missing from the files": {},
        f"missing from the files; they hold 'model.{name}'": {f"model.{name}": whole[name]},
        "has shape": {name: wide},
        "is stored as I32": {name: whole[name].to(torch.int32)},
        "belongs to a quantized matrix": {f"{module}.qweight": whole[name].to(torch.int32)},
    }
    for expected, instead in changes.items():
        tensors = {key: value for key, value in whole.items() if key != name} | instead
        save_file(tensors, checkpoint / "model.safetensors")
        message = refusal(checkpoint)
        assert name in message and expected.partition(";")[0] in message


def test_another_prefix_is_named(checkpoint: Path) -> None:
    whole = load_file(checkpoint / "model.safetensors")
    save_file({f"net.{name}": x for name, x in whole.items()}, checkpoint / "model.safetensors")
    assert "names of the decoder begin with 'model.'" in refusal(checkpoint)


@pytest.fixture(scope="module")
def target() -> Decoder:
    options = LoadConfig(model="demo", device="cpu")
    checkpoint = find_checkpoint(options)
    ops = resolve_ops(torch.device("cpu"))
    model = load_model(checkpoint, read_spec(checkpoint.path), ops, options)
    assert isinstance(model, Decoder)
    return model


def read_eagle(path: Path, target: Decoder) -> None:
    load_eagle(path, read_eagle_spec(path, target.spec, is_fused=True), target, 64)


@pytest.mark.parametrize(("name", "read"), [("eagle", read_eagle), ("medusa", load_medusa)])
def test_a_draft_that_lacks_a_tensor_it_needs_is_refused(
    name: str, read: Callable[[Path, Decoder], object], target: Decoder, tmp_path: Path
) -> None:
    bundled = find_checkpoint(LoadConfig(model=f"demo-{name}")).path
    (tmp_path / "config.json").write_bytes((bundled / "config.json").read_bytes())
    whole = load_file(bundled / "model.safetensors")
    messages = []
    for lost in whole:
        rest = {key: value for key, value in whole.items() if key != lost}
        save_file(rest, tmp_path / "model.safetensors")
        try:
            read(tmp_path, target)
        except ConfigError as error:
            messages.append(str(error))
    # Medusa's last head may be missing, and the biases
    assert len(messages) == len(whole) or (name == "medusa" and messages)
    assert not any("\n" in message for message in messages)


def test_a_file_that_is_cut_or_missing_is_named(checkpoint: Path) -> None:
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        file = checkpoint / name
        content = file.read_bytes()
        for length in (0, 1, 7, 9, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:length])
            assert name in refusal(checkpoint)
        file.unlink()
        file.mkdir()
        assert name in refusal(checkpoint)
        file.rmdir()
        if name != "tokenizer_config.json":
            assert name.removeprefix("model") in refusal(checkpoint)
        file.write_bytes(content)


@pytest.mark.parametrize("value", [None, -1, 10**5, "seven", [1], {"a": 1}])
def test_a_config_value_of_any_kind_is_read_or_refused(value: object, checkpoint: Path) -> None:
    for name in ("config", "tokenizer_config", "generation_config"):
        file = checkpoint / f"{name}.json"
        whole = json.loads(file.read_text())
        keys = set(whole) - {"architectures", "model_type"}  # other names are transformers' part
        keys |= {"rope_scaling", "rope_parameters", "quantization_config", "text_config"}
        keys |= {"added_tokens_decoder", "chat_template", "layer_types", "bos_token"}
        for key in sorted(keys):
            file.write_text(json.dumps(whole | {key: value}))
            try:
                load(checkpoint)
            except ConfigError as error:
                assert "\n" not in str(error)
        file.write_text(json.dumps(whole))
