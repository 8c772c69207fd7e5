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

.PHONY: help quickstart test test-slow test-integration test-corners lint types bench clean

help:
	@echo "make quickstart   install, get the model, train it on a tool-using task, show where the results are"
	@echo "make test         install, run the default tests"
	@echo "make test-slow    run the tests that take minutes, a whole training run among them"
	@echo "make test-integration  install a real NeMo Gym once and run the tests against it"
	@echo "make test-corners run the torch-facing tests on the oldest and newest supported torch and transformers"
	@echo "make lint types   ruff, mypy"
	@echo "make bench        the benchmarks behind the numbers in the docs"

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

test-slow: $(VENV)/.dev
	@$(BIN)/python -m pytest -m slow

test-integration: $(VENV)/.dev
	@$(BIN)/python -m pytest -m integration

# The oldest and the newest pair of torch and transformers that pyproject.toml admits.
test-corners:
	@$(MAKE) --no-print-directory VENV=.venv-oldest TORCH="torch==2.11.0" TRANSFORMERS="transformers==5.17.0" .corner
	@$(MAKE) --no-print-directory VENV=.venv-newest TORCH="torch==2.14.1" TRANSFORMERS="transformers==5.24.0" .corner

.PHONY: .corner
.corner: $(VENV)/.dev
	@$(BIN)/python -m pytest tests/generation tests/conformance tests/policy tests/tokens tests/algorithms tests/models

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.dev
	@$(BIN)/mypy

clean:
	rm -rf .venv .venv-oldest .venv-newest build dist .pytest_cache .ruff_cache .mypy_cache
