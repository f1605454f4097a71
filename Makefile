# make demo   set up, then train, evaluate and export a small model on real text (about ten minutes on two cores)
# make test   set up, then run the quick tests          make test-all   also the slow ones
# make lint   set up, then style, types and layers      make clean      remove what was made here
#
# DATA=folder   text of your own for the demo           MINUTES=5   how long it trains
# OUT=folder    where the demo writes                   PYTHON=...  a Python of 3.11 or newer

PYTHON  ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
             $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV    ?= .venv
DATA    ?=
MINUTES ?= 5
OUT     ?= runs/demo
BIN     := $(VENV)/bin

.PHONY: help demo test test-all lint format setup clean

help:
	@sed -n '1,6s/^# \{0,1\}//p' Makefile

$(BIN)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python of 3.11 or newer with venv was found; install one, or give PYTHON=path (Debian: apt install python3-venv)" >&2; exit 2; }
	@echo "setting up $(VENV) with $$($(PYTHON) --version): a few minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(BIN)/.installed

demo: setup
	$(BIN)/surefoot demo --minutes $(MINUTES) --out $(OUT) --overwrite $(if $(DATA),--data $(DATA))

test: setup
	$(BIN)/pytest -m "not slow"

test-all: setup
	$(BIN)/pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
