# One command each; all of them make .venv themselves and install nothing outside this folder.
.DEFAULT_GOAL := help
.PHONY: help run test slow long lint bench clean

SHELL := /bin/bash
BIN := .venv/bin
ARGS ?=

# torch.compile takes g++ unless CXX says otherwise.
ifeq ($(origin CXX),default)
CXX := $(if $(shell command -v g++ 2>/dev/null),g++,clang++)
endif
export CXX PYTHON

# Without compiled files every process that imports torch takes 4 s longer; tests start a hundred.
unexport PYTHONDONTWRITEBYTECODE

# Caches stay in the checkout: a second run finds what the first one compiled.
CACHE := $(CURDIR)/.cache
export TORCHINDUCTOR_CACHE_DIR ?= $(CACHE)/inductor
export TRITON_CACHE_DIR ?= $(CACHE)/triton
export MPLCONFIGDIR ?= $(CACHE)/matplotlib
export RUFF_CACHE_DIR ?= $(CACHE)/ruff

help: ## What can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'options:    PYTHON=python3.12 (which Python makes .venv), ARGS="..." (passed on), CXX=...'

run: ## Profile, propose, judge, measure and record on this machine (ARGS go to agents.run)
	@tools/setup.sh core
	@$(BIN)/python -m agents.run --target decode-bs1 $(ARGS)

test: ## The tests, on two workers (ARGS go to pytest)
	@tools/setup.sh test
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not long" $(ARGS)

slow: ## The tests that take minutes: whole runs, killed and continued
	@tools/setup.sh test
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "slow and not long" $(ARGS)

long: ## The tests for before a release: a Ray cluster, notebooks, long conversations
	@tools/setup.sh test
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m long $(ARGS)

lint: ## ruff, pyright and the import contracts
	@tools/setup.sh lint
	@failed=0; for check in "ruff check ." "ruff format --check ." pyright \
		"lint-imports --no-logo --cache-dir .cache/import_linter"; do \
		echo "$$check"; $(BIN)/$$check || failed=1; \
	done; exit $$failed

bench: ## What this machine can do at most, then the reference's baselines (ARGS go to the second)
	@tools/setup.sh core
	@$(BIN)/python -m harness ceilings
	@$(BIN)/python -m harness bench $(ARGS)

clean: ## Remove .venv and the caches; runs stay
	@rm -rf .venv .cache build *.egg-info .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
