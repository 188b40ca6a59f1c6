# `make train` and `make test` are all a newcomer needs; both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SPEC ?= specs/presets/tiny.yaml
# Files in their order: sorted by size, the few that take minutes alone would come last.
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: train compare test test-all lint types install clean

install: $(STAMP)

$(STAMP): pyproject.toml .ci/constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("moegraph needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e '.[test]'
	touch $(STAMP)

train: $(STAMP)
	$(BIN)/moegraph data prepare --corpus python-stdlib
	$(BIN)/moegraph train $(SPEC)

# The mixture of experts against the dense model of as many active parameters: six runs, 20 minutes on two cores.
compare: $(STAMP)
	$(BIN)/moegraph data prepare --corpus python-stdlib
	$(BIN)/moegraph compare presets/tiny.yaml presets/tiny-dense.yaml --seeds 0,1,2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy knows packages by their folders: a tree of links shows it the one import package the four folders make.
types: $(STAMP)
	mkdir -p $(VENV)/typed/moegraph
	ln -sfn $(CURDIR)/moegraph/* $(CURDIR)/passes $(CURDIR)/kernels $(CURDIR)/specs $(VENV)/typed/moegraph/
	cd $(VENV)/typed && ../bin/mypy --config-file $(CURDIR)/pyproject.toml -p moegraph

test: lint types
	$(BIN)/python -m pytest -m "not gpu and not slow" $(WORKERS)

test-all: lint types
	$(BIN)/python -m pytest $(WORKERS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
