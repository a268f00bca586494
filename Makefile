# Everything a person does here is one command; `make help` lists them.
# Needs Python 3.11 or newer, make, and a package registry. Choose the Python with, for example,
#   make lab PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
# Written when the environment is complete, so that a second `make lab` starts at once.
READY := .venv/ready
# As many tests at once as there are cores, but no more than 4: many start workers of their own.
# Tests of one xdist_group stay together, in their order.
TESTS := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadgroup --max-worker-restart 0

.DEFAULT_GOAL := help
.PHONY: help lab test test-all test-gpu lint course clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s%s\n", $$1, $$2 }' Makefile

lab: $(READY) ## open the course in JupyterLab (the first time: install it)
	@$(BIN)/pipeschool lab

test: $(READY) ## run the tests, but not the exhaustive ones: a few minutes
	@$(TESTS) -m "not exhaustive"

test-all: $(READY) ## run every test
	@$(TESTS)

test-gpu: $(READY) ## run the CUDA checks, on a machine that has GPUs
	@$(BIN)/python -m pytest -m gpu tests/runtime/test_gpu.py

lint: $(READY) ## check style, types and which module may import which
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_floors.py

course: $(READY) ## rebuild the notebooks from solutions/*/*.py
	@$(BIN)/python -m pipeschool.publish

clean: ## remove the environment and all caches (keeps your work and grading/)
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist lib/*.egg-info
	find lib tests solutions course -name __pycache__ -prune -exec rm -rf {} +

# The environment is made again only where it is missing or broken, and pip changes only what the
# lock asks for.
$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "pipeschool needs Python 3.11 or newer and '$(PYTHON)' is not: name another one, for example: make lab PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c requirements.lock -e '.[dev]'
	@touch $@
