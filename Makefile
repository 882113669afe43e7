# Two commands: `make install`, then `make demo`. `make help` lists the others.
PYTHON ?= python3
VENV   ?= .venv
# tests, and what else runs several processes: one thread each
JOBS   ?= 2
# where `make docs` writes
SITE   ?= site

TORCH  := 2.13.0
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
LOCK    = constraints/$(shell $(PYTHON) -c 'import sys; print("py310.txt" if sys.version_info < (3, 11) else "py311.txt")')
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# image data beside the clone, where there are any
ifneq ($(wildcard ../shared/data),)
export SCALLA_DATA ?= $(abspath ../shared/data)
endif

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast stress lint format bench bench-fmnist reproduce docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## a virtual environment in .venv: the project, every extra, the development tools, at pinned versions

# The stamp is written last, so a failed installation is begun again. torch comes first and by itself: its build
# (CPU, CUDA) is the machine's choice. The list is complete and goes in without dependencies: constraints/refresh.py
# says why.
$(STAMP): Makefile pyproject.toml constraints/py310.txt constraints/py311.txt
	@rm -f $@
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "scalla needs Python 3.10 or later; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make install PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --progress-bar off -c $(LOCK) torch==$(TORCH)
	$(PIP) install --quiet --progress-bar off --no-deps -r $(LOCK)
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@$(BIN)/python -c 'import torch, scalla, laplace' 
	@touch $@
	@echo "installed: scalla $$($(BIN)/python -c 'import scalla, torch; print(scalla.__version__, "on torch", torch.__version__)')"

demo: $(STAMP) ## a minute: digits against photographs, a table and a page (demo_output/report.html)
	$(BIN)/scalla demo

test: $(STAMP) ## the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -q $(ARGS)

test-fast: $(STAMP) ## the suite without what is marked slow
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -q -m "not slow and not stress" $(ARGS)

stress: $(STAMP) ## kills, damaged files, processes, threads, a soak, in long: a table of faults and promises
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m stress $(ARGS) tests/stress

lint: $(STAMP) ## ruff (lint and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## let ruff format and mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## time and memory of fits and predictions: JSON, a table and plots (half an hour on one core)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/perf/run.py --out docs/measured/perf --page docs/performance.md $(ARGS)

bench-fmnist: $(STAMP) ## the FashionMNIST benchmark at reduced length
	$(BIN)/scalla benchmark fmnist --quick

reproduce: $(STAMP) ## every number of the report: both benchmarks in full, then the report (hours)
	$(BIN)/scalla benchmark fmnist
	$(BIN)/scalla benchmark regression
	$(BIN)/scalla report

docs: $(STAMP) ## the documentation site, built strictly, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir $(SITE)

clean: ## remove what the commands above made, but for .venv and results
	rm -rf demo_output site build dist htmlcov .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
