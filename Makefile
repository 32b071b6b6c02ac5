# The commands people use. Everything happens in .venv and build/; nothing outside the checkout
# changes.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PYTEST := $(BIN)/pytest -W error -n 2 --dist loadgroup

.PHONY: install demo check test slow generated

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[compiler,serve,structured,test]'
	touch $@

# A synthetic model, compiled and run: text and tokens per second.
demo: install
	$(BIN)/deepinfer-compile examples/v41_nano.yaml --target cpu -o build/nano.engine
	$(BIN)/deepinfer-engine run build/nano.engine --prompt "Hello" --max-tokens 64

# mypy finds packages by folder name; the in-tree targets and templates are installed under others.
build/typing:
	mkdir -p $@
	ln -sfn ../../targets $@/deepinfer_targets
	ln -sfn ../../templates $@/deepinfer_templates

check: install build/typing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -m "not slow" tests/spec tests/ir tests/emit tests/test_layering.py

# All that CI runs.
test: check
	$(PYTEST) -m "not slow" tests --ignore=tests/spec --ignore=tests/ir --ignore=tests/emit \
	  --ignore=tests/test_layering.py

# Long sweeps.
slow: install
	$(PYTEST) -m slow tests

# Rewrite generated/: read the diff like code.
generated: install
	$(BIN)/python -m tests.emit.regenerate
