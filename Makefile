# `make demo`, `make test`, `make bench`: each creates .venv, installs the pinned dependencies, builds and runs;
# the second time it only runs.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)
CXX_SOURCES := $(shell find csrc tests/cuda -name '*.h' -o -name '*.cpp' -o -name '*.cu')

.PHONY: help build demo test doctest bench lint format clean

help:
	@echo "make demo     measure every op against its peers, then train a small language model"
	@echo "make test     run the tests"
	@echo "make doctest  run the examples of the docstrings"
	@echo "make bench    measure every op against its peers, full size"
	@echo "make lint     check format, lint and types; make format mends the format"
	@echo "make build    .venv with the pinned dependencies, and the compiled library"
	@echo "make clean    remove all of that"

.venv/deps.stamp: requirements.txt requirements-peers.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -r requirements.txt
	$(BIN)/python -m pip install --no-deps -r requirements-peers.txt
	touch $@

# setup.py first, because pip hides the build's progress; pip then finds everything built.
.venv/build.stamp: .venv/deps.stamp $(SOURCES)
	$(BIN)/python setup.py -q build_ext --inplace
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps -e .
	touch $@

build: .venv/build.stamp

demo: build
	$(BIN)/python -m pyops demo

test: build
	$(BIN)/python -m pytest tests

doctest: build
	$(BIN)/python -m pytest --doctest-modules pyops

bench: build
	$(BIN)/python -m pyops bench

lint: build
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: build
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CXX_SOURCES)

clean:
	rm -rf .venv build dist out pyops/lib pyops/_C*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache
