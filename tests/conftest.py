"""One thread unless a test asks for more: on tiny tensors, waiting threads cost more than the work.

Set before torch is imported, and inherited by the processes that tests start.

Property tests draw the same examples in every run, so that a green commit stays green;
`pytest --hypothesis-profile=search` draws new ones, many more where a test sets no number.

A run in the background of a shell script has SIGINT ignored, and so would the processes that tests
start and interrupt: it is taken back.

An exception of a task that nothing retrieves fails the test in which asyncio reports it.

What the collection leaves (modules, tests, parameters) lives as long as the process, so the garbage
collector passes over it: that saves a sixth of the time of the tests that allocate much.

Triton's kernels are interpreted where there is no GPU. Triton reads that when it is imported, which
parts of torch do, so it is set before any test; `interpreted_kernels` makes it shorter.

Clients of tests speak plain HTTP. Without certificates of authorities to read, each starts 50 ms
earlier.

Nothing is stored in the user's cache, here and in the processes that tests start.

`pytest --without-torch` runs as if torch were not installed: `make test` runs `tests/pure` so.
"""

import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

_ROOT = Path(__file__).resolve().parents[1]

# They need other packages: `make clients`, `make page`, `make real`.
collect_ignore = ["clients", "page", "real"]
os.environ["QUICKSTEP_CACHE_DIR"] = ""  # empty: store nothing
os.environ["SSL_CERT_FILE"] = ""
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)  # without any
try:
    ctypes.CDLL("libcuda.so.1")
except OSError:  # no GPU of NVIDIA can be used; the file of a device may be missing where one can
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that spin take the core from other processes

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("same", derandomize=True, database=None, deadline=None)
settings.register_profile("search", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-torch", action="store_true", help="as if torch were not installed")


def pytest_configure(config: pytest.Config) -> None:
    spec = find_spec("quickstep")
    imported = Path(spec.origin).resolve() if spec is not None and spec.origin else Path()
    if "site-packages" not in imported.parts and not imported.is_relative_to(_ROOT):
        raise pytest.UsageError(
            f"quickstep is imported from {imported}, not from {_ROOT}: an editable installation "
            "comes before PYTHONPATH; use an environment in which quickstep is not installed"
        )
    if config.getoption("--without-torch"):
        sys.modules["torch"] = None  # type: ignore[assignment]  # `import torch` raises


def pytest_collection_finish() -> None:
    if "triton.runtime.interpreter" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        from interpreted_kernels import shorten_interpretation

        shorten_interpretation()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def garbage_is_collected_after_each_test() -> Iterator[None]:
    """What a test leaves disabled costs the tests after it gigabytes."""
    yield
    is_enabled = gc.isenabled()
    gc.enable()
    assert is_enabled, "the test left garbage collection disabled"


@pytest.fixture(autouse=True)
def every_task_has_an_owner() -> Iterator[None]:
    """asyncio logs what a task of nobody raised when the task is collected."""
    lost: list[str] = []

    class Lost(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "was never retrieved" in record.getMessage():
                lost.append(record.getMessage())

    handler, logger = Lost(logging.ERROR), logging.getLogger("asyncio")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not lost


@pytest.fixture
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted Triton kernels multiply matrices with NumPy. In its product, the bits of a row
    depend on the row's place on some CPUs (Zen 5), so here every row is summed in one order.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    import numpy as np

    def create_dot(_: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        product = np.add.reduce(a.data[:, :, None] * b.data[None], axis=1, dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
