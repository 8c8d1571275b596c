# `make run` runs a demonstration, `make test` the tests that a change should pass. Both set up .venv at their first call.
# Use `make quick` while you work on a method. CI runs `make full`: the same tests and the engine with every method.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION := 1
# Without it, each of the processes that tests start would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# Tests run in one worker per core and two that mostly wait (tests/conftest.py), with one thread each.
test full quick slow mutants: export OMP_NUM_THREADS := 1
WORKERS := -n auto
# The mathematics: the core, every method, the local learning; without whole federations.
QUICK := $(sort $(wildcard tests/test_defaults.py tests/test_aggregation.py tests/test_core_*.py $(patsubst %,tests/test_%.py,$(notdir \
	$(basename $(wildcard strategies/*.py clients/*.py fedapp/learning/*.py))))))

.PHONY: run test full quick slow mutants goldens bench lint docs setup clean

run: $(READY)
	$(BIN)/fedapp compare fedapp/conf/digits.toml --methods local,lgfedavg,fedclassavg --rounds 8 --engine ray

test: $(READY) lint
	$(BIN)/python -m pytest $(WORKERS)

full: $(READY) $(VENV)/.docs lint
	$(BIN)/python -m pytest $(WORKERS) -m "not slow"

quick: $(READY) lint
	$(BIN)/python -m pytest $(WORKERS) -m "not slow and not full and not files" $(QUICK)

slow: $(READY)
	$(BIN)/python -m pytest -m slow

mutants: $(READY)
	$(BIN)/python -m tools.mutants --page docs/mutants.md

goldens: $(READY)
	$(BIN)/python -m tools.goldens

bench: $(READY)
	$(BIN)/python -m benchmarks

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.phrases

# The documentation site, in site/. A warning is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/.docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]" -c constraints.txt
	touch $@

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("fedapp needs Python 3.11 or later: make PYTHON=/path/to/python3.11 run" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,figures]" -c constraints.txt
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
