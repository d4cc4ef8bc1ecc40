"""The environment variables that Quickstep and the libraries it uses read, and what each does.

`quickstep doctor` lists those that are set. `docs/reference/environment.md` is
written from them; `tools/write_environment_reference.py` finds a variable that is read somewhere
and is not here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

# Read by our own code.
OWN: Mapping[str, str] = MappingProxyType(
    {
        "QUICKSTEP_API_KEY": "a key of `quickstep serve`, as `KEY` or `NAME=KEY`, next to those of "
        "the flags; commands that talk to a server send it",
        "QUICKSTEP_ENGINE_TOKEN": "the token of `quickstep engine` and of `quickstep serve "
        "--engines`, if there is no `--engine-token-file`",
        "QUICKSTEP_CACHE_DIR": "where step times, packed weights and checks of GPUs are stored; "
        "empty stores nothing. Default: `$XDG_CACHE_HOME/quickstep`, or `~/.cache/quickstep`",
        "XDG_CACHE_HOME": "the folder of caches, if `QUICKSTEP_CACHE_DIR` is not set",
        "QUICKSTEP_CPU_ISA": "the instruction set of the native kernels, one that `quickstep "
        "doctor` lists",
        "OMP_NUM_THREADS": "at most so many threads, if `--threads` is not given",
        "OTEL_SERVICE_NAME": "the name of the service in traces, with `--otlp-traces-endpoint`; "
        "default: `quickstep`",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "milliseconds until a batch of traces is given up",
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "the same, for traces only",
        "TRITON_INTERPRET": "1 runs Triton's kernels without a GPU, for tests",
    }
)

# Read by a library.
OF_LIBRARIES: Mapping[str, str] = MappingProxyType(
    {
        "HF_HOME": "the folder of checkpoints that are downloaded, in `hub`",
        "HF_HUB_CACHE": "that folder itself",
        "HF_TOKEN": "for gated and private models",
        "HF_HUB_OFFLINE": "1: as `--offline`",
        "OTEL_EXPORTER_OTLP_HEADERS": "headers of the exporter; so are OpenTelemetry's others",
    }
)

# Those with values that are not printed.
SECRETS = frozenset(
    {
        "QUICKSTEP_API_KEY",
        "QUICKSTEP_ENGINE_TOKEN",
        "HF_TOKEN",
        "OTEL_EXPORTER_OTLP_HEADERS",
    }
)

# Secrets of a server: its child processes do not need them. `HF_TOKEN` is for those that load.
OF_SERVERS = SECRETS - {"HF_TOKEN"}


def of_children(environ: Mapping[str, str], hidden: Collection[str] = ()) -> dict[str, str]:
    """The environment for child processes: without the secrets of servers, and without `hidden`."""
    return {
        name: value
        for name, value in environ.items()
        if name not in OF_SERVERS and name not in hidden
    }


# Definitions for CMake when it is built: `pip install -C cmake.define.NAME=VALUE .`
WHEN_BUILDING: Mapping[str, str] = MappingProxyType(
    {
        "QUICKSTEP_NATIVE": "`OFF` leaves the native kernels out",
        "QUICKSTEP_THIS_MACHINE": "`ON` compiles them for this machine's CPU only",
    }
)
