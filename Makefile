# Every target sets up what it needs: a virtual environment with torch_xla, once.
PYTHON ?= python3
VENV ?= .venv
TORCH_XLA ?= 2.9.0
BIN = $(VENV)/bin
READY = $(VENV)/.ready-$(TORCH_XLA)

.PHONY: env demo test check lint bench clean

env: $(READY)

$(READY): setup.cfg
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==$(TORCH_XLA) torch_xla==$(TORCH_XLA) numpy
	$(BIN)/pip install --quiet -e .[test,lint]
	touch $@

# A training program written for XRT, on real data, with several replicas on the CPU.
REPLICAS ?= 4
demo: env
	PJRT_DEVICE=CPU $(BIN)/pjrt-compat run --log info docs/examples/train_digits_xrt.py --num_cores $(REPLICAS)

test: lint check

check: env
	$(BIN)/python -m pytest

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Ratios of the specification's bars, measured in one run; rewrites docs/performance.md.
bench: env
	$(BIN)/python tests/bench/run.py

clean:
	rm -rf $(VENV) build dist *.egg-info
