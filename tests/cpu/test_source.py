"""Finding checkpoints: directories, the bundled model, hub ids with and without the network."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from quickstep.config import LoadConfig
from quickstep.errors import ConfigError
from quickstep.model.checkpoint import source
from quickstep.model.checkpoint.source import find_checkpoint


def test_a_directory_is_itself_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    found = find_checkpoint(LoadConfig(model=str(tmp_path / "my-model")))
    assert (found.path, found.name) == ((tmp_path / "my-model").resolve(), "my-model")


def test_demo_is_the_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_BUNDLED", tmp_path)
    with pytest.raises(ConfigError, match="bundled"):
        find_checkpoint(LoadConfig(model="demo"))
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.json").write_text("{}", encoding="utf-8")
    found = find_checkpoint(LoadConfig(model="demo"))
    assert (found.path, found.name) == (tmp_path / "demo", "demo")


@pytest.mark.parametrize("name", ["./missing", "/no/such/place", "a b", "too/many/parts"])
def test_what_is_neither_a_directory_nor_a_hub_id_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="neither a directory nor a hub id"):
        find_checkpoint(LoadConfig(model=name, offline=True))


def test_no_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="no model is named"):
        find_checkpoint(LoadConfig(model=""))


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file"):
        find_checkpoint(LoadConfig(model=str(tmp_path / "model.bin")))


def test_offline_never_asks_the_network_and_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[bool] = []

    def absent(name: str, *, local_files_only: bool, **_: object) -> str:
        calls.append(local_files_only)
        raise LocalEntryNotFoundError(name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    with pytest.raises(ConfigError, match="offline mode is on"):
        find_checkpoint(LoadConfig(model="org/model", offline=True))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="offline mode is on"):
        find_checkpoint(LoadConfig(model="org/model"))
    assert calls == [True, True]


def test_a_hub_id_downloads_no_pickle_and_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, object] = {}

    def download(name: str, **options: object) -> str:
        calls.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    found = find_checkpoint(LoadConfig(model="org/model", revision="v2"))
    assert (found.path, found.name) == (tmp_path, "org/model")
    assert (calls["name"], calls["revision"], calls["local_files_only"]) == (
        "org/model",
        "v2",
        False,
    )
    patterns = calls["allow_patterns"]
    assert isinstance(patterns, list)
    endings = {pattern.rsplit(".", 1)[-1] for pattern in patterns}
    assert endings.isdisjoint({"bin", "pt", "pth", "ckpt", "pkl", "py"})
    assert {"json", "safetensors"} <= endings
