# Everything that a person or CI does with this repository, by name. `make help` lists it.

# Any Python 3.11 to 3.13, for example: make install PYTHON=python3.12
PYTHON ?= python3
# Which installer: pip, or uv where it is on the PATH.
INSTALLER ?= pip
# The pins; CI names a variant of this file to test an older torch.
CONSTRAINTS ?= constraints.txt
# Test processes side by side. The tests start ranks of their own, so more than the cores don't help.
JOBS ?= 2
# More arguments for pytest, for example: make test-fast ARGS="-k identity"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST = $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

# What is installed, in words that pip and uv share.
PROJECT := --constraint $(CONSTRAINTS) --no-build-isolation \
	--group dev --group docs --editable ".[s3,gcs,report]"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-fast test-dist test-gpu test-all soak lint format docs bench \
	reference constraints

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## create .venv and install the pinned dependencies, where that is not done yet

# The stamp goes last, so that an install that was cut short is done again. The virtual environment is
# never cleared: `rm -r .venv` is a person's decision.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) \
	|| version=missing; \
	case "$$version" in \
	3.11 | 3.12 | 3.13) ;; \
	*) printf '%s\n' "kettle needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is $$version." \
		"Name another one, for example: make install PYTHON=python3.12" >&2; exit 2 ;; \
	esac
	@test -x $(BIN)/python || { echo "creating $(VENV) with $$($(PYTHON) --version)" && \
		$(PYTHON) -m venv $(VENV); }
	@echo "installing the pinned dependencies with $(INSTALLER) (a few minutes the first time)"
	@$(MAKE) --no-print-directory install-with-$(INSTALLER)
	@touch $@

.PHONY: install-with-pip install-with-uv
install-with-pip:
	$(BIN)/python -m pip install --constraint $(CONSTRAINTS) --upgrade pip setuptools
	$(BIN)/python -m pip install $(PROJECT)

# uv doesn't read pip's settings, and the CPU build of torch may be offered there alone. So pip
# brings torch, and uv, which finds it done, brings everything else.
install-with-uv:
	$(BIN)/python -m pip install --constraint $(CONSTRAINTS) --no-deps torch
	uv pip install --python $(BIN)/python --constraint $(CONSTRAINTS) pip setuptools
	uv pip install --python $(BIN)/python $(PROJECT)

demo: install ## train, evict five times, resume, compare with the uninterrupted run
	$(BIN)/python scripts/chaos.py examples/stdlib.toml --evictions 5 --workers 2 --out out/demo

test: install ## the full test suite on CPU (under 15 minutes on 2 cores)
	$(PYTEST) -m "not gpu and not soak" $(ARGS)

test-fast: install ## every test that starts no process group (under 2 minutes)
	$(PYTEST) -m "not dist and not gpu and not soak" $(ARGS)

test-dist: install ## the tests that start process groups or launchers
	$(PYTEST) -m "dist and not gpu and not soak" $(ARGS)

test-gpu: install ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(ARGS)

test-all: install ## every test that this machine can run
	$(PYTEST) $(ARGS)

soak: install ## kill a short run at 200 random instants (about 5 minutes)
	$(BIN)/python scripts/soak.py $(ARGS)

lint: install ## ruff, formatting, mypy and the layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install ## format the code and apply the safe fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: install ## build the pages into site/, where a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

reference: install ## write the reference pages anew from the code
	$(BIN)/python scripts/gen_reference.py

bench: install ## measure speed and write benchmarks/results/
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/checkpoint.py

# With UPGRADE=--upgrade it takes the newest releases; without, it keeps every pin that still fits.
constraints: ## resolve constraints.txt anew (needs uv)
	uv pip compile --quiet --universal --python-version 3.11 --all-extras --group dev --group docs \
		--no-emit-package pywin32 --no-emit-package httpx2-jsfetch --no-annotate \
		--custom-compile-command "make constraints   (with UPGRADE=--upgrade: newest releases)" \
		$(UPGRADE) pyproject.toml --output-file constraints.txt
