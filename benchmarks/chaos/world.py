"""The server of the chaos run, and the machine around it, as far as it may be broken.

`World` starts the server of a site (`sites`) in folders of its own: the ledger, KV blocks and files
of clients each on a small disk of memory, if this process may mount one, as /dev/shm is.
Mounts are visible to this process and its children only (`own_mounts`), so that nothing stays.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from benchmarks.chaos.sites import Site
from benchmarks.pulled_cable import Proxy
from quickstep.bench.server_process import ServerProcess, with_descendants
from quickstep.engine.remote.host import EngineAddress

__all__ = ["ADMIN", "NEIGHBOUR", "Held", "World", "own_mounts"]

ADMIN = {"authorization": "Bearer operator-key"}
NEIGHBOUR = {"authorization": "Bearer neighbour-key"}
STALL_S = 3.0  # of the server
PATIENCE_S = 10.0  # the deadline of requests that have no field for one
_CLONE_NEWNS = 0x00020000
_END_S = 5.0  # for processes to end after the server
_POOLED = 6  # threads of pools that may not have been needed before
_DISKS = {"ledger": "256m", "kv": "32m", "files": "64m", "tmp": "64m"}
_KEYS = """\
neighbour: {key: neighbour-key}
first: {key: first-key, budget: {tokens: 1000000000, per: day}}
second: {key: second-key, requests_per_minute: 1000000, weight: 2}
"""
_PRICES = "default: {input_per_million: 0.15, output_per_million: 0.60, device_per_hour: 1.20}\n"
_BUNDLED = Path(__file__).parents[2] / "src" / "quickstep" / "bundled"
CLIENT_KEYS = ("first-key", "second-key")


def own_mounts() -> bool:
    """Give this process mounts of its own. Returns False if it may not mount."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        return False
    return not subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True).returncode


def build_shim(folder: Path) -> Path | None:
    """Compile `shim.c`; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library, source = folder / "shim.so", Path(__file__).with_name("shim.c")
    command = [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"]
    return None if subprocess.run(command, capture_output=True).returncode else library


class Held:
    """Counts of what a server holds when nothing runs, of which nothing may be left."""

    def __init__(self, world: World) -> None:
        ids = world.process_ids()
        self.opened = _opened(ids[0])
        self.counts = {
            "processes": len(ids),
            "processes of grammars": len(world.ids_of(b"grammar.trial_worker")),
            "processes of long texts": len(world.ids_of(b"text.tokenizer_worker")),
            "threads of the server": _num_threads(ids[0]),
            "threads of engines": sum(_num_threads(engine) for engine in world.engine_ids()),
            "descriptors of the server": _num_descriptors(ids[0]),
            "descriptors of engines": sum(
                _num_descriptors(engine) for engine in world.engine_ids()
            ),
            "entries of /dev/shm": len(list(Path("/dev/shm").iterdir())),
            "temporary files": sum(1 for _ in (world.folder / "tmp").rglob("*")),
            "files of clients": len(list((world.folder / "files").glob("file-*"))),
            **world.site.held(),
        }

    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in self.counts.items())

    def above(self, before: Held) -> dict[str, str]:
        """What there is more of than before; of descriptors, which ones."""
        more = self.opened - before.opened
        which = ", ".join(f"{count} x {what}" for what, count in more.items())
        return {
            name: f"{before.counts[name]} before, {count} at the end"
            + (f" ({which})" if name == "descriptors of the server" else "")
            for name, count in self.counts.items()
            if count > before.counts[name] + (_POOLED if "threads of the server" in name else 0)
        }


def _opened(process_id: int) -> Counter[str]:
    """The descriptors of a process by what they are, without numbers."""
    found: Counter[str] = Counter()
    for entry in Path(f"/proc/{process_id}/fd").iterdir():
        with suppress(OSError):
            found[re.sub(r"\[\d+\]", "", str(entry.readlink()))] += 1
    return found


def _num_threads(process_id: int) -> int:
    return _listed(process_id, "task")


def _num_descriptors(process_id: int) -> int:
    return _listed(process_id, "fd")


def _listed(process_id: int, what: str) -> int:
    try:
        return len(list(Path(f"/proc/{process_id}/{what}").iterdir()))
    except OSError:
        return 0


class World:
    """The server and its folders. `open`, and `close` at the end."""

    def __init__(self, site: Site, has_mounts: bool) -> None:
        self.site = site
        self.has_mounts = has_mounts
        self.folder = Path(tempfile.mkdtemp(prefix="quickstep-chaos-"))
        self.has_shim = False
        self.server: ServerProcess
        self.cable = Proxy()  # on the way of some clients
        self._mounted: list[Path] = []

    def open(self) -> None:
        """Start the server."""
        for name in _DISKS:
            (self.folder / name).mkdir()
        if self.has_mounts:
            for name, size in _DISKS.items():
                self._mount(self.folder / name, size)
            self._mount(Path("/dev/shm"), "16m")
        keys, prices = self.folder / "keys.yaml", self.folder / "prices.yaml"
        keys.write_text(_KEYS)
        keys.chmod(0o600)
        prices.write_text(_PRICES)
        environment = {
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        library = build_shim(self.folder)
        if library is not None:
            self.has_shim = True
            self.set_shim(0, 0)
            environment |= {
                "LD_PRELOAD": str(library),
                "QUICKSTEP_CHAOS_SHIM": str(self.folder / "shim"),
            }
        self.server = ServerProcess(
            [
                *self.site.open(self.folder, {**os.environ, **environment}),
                *("--default-timeout-s", f"{PATIENCE_S:g}", "--stall-timeout-s", str(STALL_S)),
                # what a silent client holds is given back while the run waits for it
                *("--header-timeout-s", "5", "--upload-timeout-s", "5"),
                *("--api-key-file", str(keys), "--admin-api-key", "operator=operator-key"),
                *("--price-book", str(prices), "--usage-db", str(self.ledger)),
                *("--files-dir", str(self.folder / "files")),
                *("--response-store", str(self.folder / "files" / "responses.db")),
            ],
            environment,
        )
        self.server.start()
        address = urlsplit(self.server.url)
        self.cable.target = EngineAddress(address.hostname or "", address.port or 0)
        self.cable.__enter__()

    @property
    def far_url(self) -> str:
        """The server's address over the cable."""
        return f"http://{self.cable.address.host}:{self.cable.address.port}"

    def adapter_path(self, name: str) -> Path:
        """The folder of a bundled adapter."""
        return _BUNDLED / name

    def _mount(self, folder: Path, size: str) -> None:
        options = ["-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", str(folder)]
        subprocess.run(["mount", *options], check=True, capture_output=True)
        self._mounted.append(folder)

    @property
    def ledger(self) -> Path:
        """The file of `--usage-db`."""
        return self.folder / "ledger" / "usage.db"

    def set_shim(self, clock_s: float | None = None, write_s: float | None = None) -> None:
        """Shift the server's wall clock, and delay its writes."""
        path = self.folder / "shim"
        old = struct.unpack("<qq", path.read_bytes()) if path.exists() else (0, 0)
        clock_ns = old[0] if clock_s is None else int(clock_s * 1e9)
        write_us = old[1] if write_s is None else int(write_s * 1e6)
        with path.open("r+b" if path.exists() else "wb") as file:
            file.write(struct.pack("<qq", clock_ns, write_us))

    def engine_ids(self) -> list[int]:
        """The processes of engines, the oldest first."""
        return sorted([*self.ids_of(b"engine.remote.worker"), *self.site.roots()])

    def process_ids(self) -> list[int]:
        """The server, then all that descends from it, and the processes of its site."""
        others = (with_descendants(root) for root in self.site.roots())
        return [*self.server.process_ids(), *itertools.chain.from_iterable(others)]

    def ids_of(self, module: bytes) -> list[int]:
        """The processes of the server that run a module, the oldest first, without those that are
        about to run another one.
        """
        commands = {child: _command(child) for child in self.process_ids()[1:]}
        return sorted(
            child
            for child, command in commands.items()
            if module in command and commands.get(_parent(child)) != command
        )

    def health(self) -> dict[str, object]:
        """What `/health` says."""
        found: dict[str, object] = httpx.get(f"{self.server.url}/health", timeout=10).json()
        return found

    def log(self) -> list[str]:
        """Lines of the server's log and of its site's."""
        others = sorted(self.folder.glob("host-*.log"))
        return self.server.log + [line for path in others for line in path.open(errors="replace")]

    def close(self) -> tuple[int, list[str]]:
        """End the server. Returns its exit status, and which of its processes are left."""
        ids = self.server.process_ids()
        status = self.server.stop()
        until_s = time.monotonic() + _END_S
        while True:
            left = {child: _command(child) for child in ids}
            left = {
                child: command for child, command in left.items() if command
            }  # a zombie has none
            if not left or time.monotonic() > until_s:
                break
            time.sleep(0.05)
        found = [f"{child} {command.decode()}" for child, command in left.items()]
        return status, found + self.site.close()

    def remove(self) -> None:
        """Remove all folders, and the server if it runs."""
        for child in self.server.process_ids():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self.site.remove()
        self.cable.__exit__()
        for folder in self._mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def _command(process_id: int) -> bytes:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:
        return b""


def _parent(process_id: int) -> int:
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def address_space_bytes(process_id: int) -> int:
    """What a process has mapped."""
    status = Path(f"/proc/{process_id}/status").read_text()
    found = re.search(r"VmSize:\s+(\d+) kB", status)
    return int(found.group(1)) * 1024 if found else 0
