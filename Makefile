# `make demo` and `make test` set up everything they need in .venv and run; `make help` lists all.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# One thread a process: two that wait for each other's threads are slower than two that do not.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
SPREAD := -n 2 --dist worksteal
GATE   := $(BIN)/nanovllm gate

.DEFAULT_GOAL := help
.PHONY: mutation help setup demo test unit property equality parallel perf gate baseline deep lint format gpu clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## create .venv and install the package with its test tools

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "nanovllm needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,lint,study]'
	@touch $@

demo: $(READY)  ## run the engine on the embedded model
	$(BIN)/nanovllm info
	$(BIN)/nanovllm generate "And it came to pass" --max-tokens 70 --temperature 0.7 --seed 1

test: lint unit property equality parallel perf gate  ## everything that needs no GPU

unit: $(READY)  ## components; about a minute
	$(PYTEST) -m unit $(SPREAD) tests/unit

property: $(READY)  ## generated tests of the scheduler and the blocks
	$(PYTEST) -m property $(SPREAD) tests/property

equality: $(READY)  ## token for token against HF transformers
	$(PYTEST) -m equality -n 2 --dist loadfile tests/equality

parallel: $(READY)  ## ranks and engines with a process each, and what happens if one dies
	$(PYTEST) -m parallel tests/parallel

perf: $(READY)  ## speed, as ratios within one run
	$(PYTEST) -m perf -p no:randomly --benchmark-timer=time.process_time tests/perf

gate: $(READY)  ## regression gates: exact counts, and times against the commit before
	$(GATE) counts --suite tests/perf/test_counts.py --package nanovllm
	$(GATE) times --suite tests/perf/test_gate.py --package nanovllm

baseline: $(READY)  ## write the exact counts anew, on purpose
	$(GATE) counts --suite tests/perf/test_counts.py --package nanovllm --update

deep: $(READY)  ## hours: many more examples and the full product of equality conditions
	NANOVLLM_PROFILE=deep $(PYTEST) -m "unit or property or equality"
	$(BIN)/python scripts/conformance_power.py --write docs/conformance.md \
	    --results build/power-$$(git rev-parse --short HEAD).jsonl

mutation: $(READY)  ## half an hour: does a test notice each change of what decides?
	$(BIN)/python scripts/mutation_score.py

gpu: $(READY)  ## needs a CUDA device
	$(PYTEST) -m gpu --require gpu

lint: $(READY)  ## ruff, mypy, and requirements against tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m nanovllm.conformance.registry --check docs/spec.md --lint tests

format: $(READY)  ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and caches
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
