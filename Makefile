# The targets people use. Everything happens in .venv; nothing outside the checkout changes.
PYTHON ?= python3.11
BIN := .venv/bin
SHELL := /bin/bash

.PHONY: install demo test check slow

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[compiler,test]'
	touch $@

install: .venv/installed

# mypy looks packages up by folder name; the in-tree targets have another one.
build/typing:
	mkdir -p $@
	ln -sfn ../../targets $@/deepinfer_targets
	ln -sfn ../../templates $@/deepinfer_templates

check: install build/typing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -W error -m "not slow" tests/spec tests/ir tests/checkpoint tests/emit tests/test_layering.py
