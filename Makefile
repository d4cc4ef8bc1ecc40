# Two commands do everything on a fresh machine with Python >= 3.11 (and gcc, for the native kernels):
#   make demo    stream text from the bundled model
#   make test    run the tests
# Each makes the environment in .venv first, once: the demo a small one (no PyTorch, the kernels of
# this machine's CPU only), the tests and everything else the complete one.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SMALL := $(VENV)/.small
READY := $(VENV)/.ready
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*.* csrc/kernels/*)
# A process per core, of about 1 GB each; `make test PYTEST_WORKERS=0` runs all tests in one.
PYTEST_WORKERS ?= auto
PYTEST := $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --maxprocesses 4 --dist worksteal
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test check format bench soak peers gpu verify native reference clean

help:
	@echo "make demo | test | check | format | reference | verify | native | bench | soak | peers | gpu | clean"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(SMALL): $(SOURCES) | $(BIN)/python
	$(PIP) -C cmake.define.QUICKSTEP_THIS_MACHINE=ON -e .
	@touch $@

$(READY): $(SOURCES) | $(BIN)/python
	$(PIP) -C cmake.define.QUICKSTEP_THIS_MACHINE=OFF -e '.[dev]'
	@touch $@ $(SMALL)

demo: $(SMALL)
	@$(BIN)/quickstep demo

test: $(READY)
	$(PYTEST) --without-torch tests/pure
	$(PYTEST) --ignore=tests/pure

verify: $(READY)
	$(BIN)/quickstep verify --requests 2000

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/check_layers.py
	$(BIN)/python tools/check_names.py
	$(BIN)/python tools/check_docs.py
	$(BIN)/python tools/write_api_reference.py --check

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Write docs/reference from the schemas of the server.
reference: $(READY)
	$(BIN)/python tools/write_api_reference.py

# Rebuild the native kernels in place, for work on csrc/.
native:
	cmake -S . -B build/native
	cmake --build build/native --parallel

# Measurements: on a quiet machine, on purpose.
bench: $(READY)
	$(BIN)/python -m benchmarks

# A served model under mixed load with aborts and malformed requests: make soak MINUTES=10
MINUTES ?= 10
soak: $(READY)
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES)

# Quickstep beside vLLM, OpenVINO, llama.cpp and transformers, in turns, for about three hours; sets
# them up first (GBs). `make peers PEERS=--quick` takes 10 minutes once they are set up.
PEERS ?= --workloads w1 w2 w3 w4 footprint
peers: $(READY)
	$(BIN)/python -m benchmarks.peers $(PEERS)

# On a machine with an NVIDIA GPU, with the Python that has its torch: make gpu PYTHON=python3
gpu:
	PYTHONPATH=src $(PYTHON) -m pytest tests/cuda
	PYTHONPATH=src $(PYTHON) -m benchmarks --device cuda

clean:
	rm -rf $(VENV) build dist src/quickstep/_native .pytest_cache .mypy_cache .ruff_cache .hypothesis
