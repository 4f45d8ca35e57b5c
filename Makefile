# Every target sets up what it needs: a virtual environment with torch_xla, once.
PYTHON ?= python3
VENV ?= .venv
TORCH_XLA ?= 2.9.0
WRAPT ?= >=1.14
# torch 2.1 and 2.2 were built against NumPy 1.
NUMPY = $(if $(filter 2.1.% 2.2.%,$(TORCH_XLA)),numpy<2,numpy)
BIN = $(VENV)/bin
READY = $(VENV)/.ready-$(TORCH_XLA)

.PHONY: env demo test check lint bench matrix clean

env: $(READY)

$(READY): setup.cfg
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==$(TORCH_XLA) torch_xla==$(TORCH_XLA) "$(NUMPY)" \
		"wrapt$(WRAPT)" -e .[test,lint]
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

# The tests on each release, one environment at a time; what has passed is not run again.
MATRIX ?= 2.1.0 2.2.0 2.3.0 2.4.0 2.5.1 2.6.0 2.7.0 2.8.0 2.9.0
matrix: $(addprefix build/matrix/passed-,$(MATRIX))

build/matrix/passed-%:
	mkdir -p build/matrix
	$(MAKE) check VENV=build/matrix/venv-$* TORCH_XLA=$* "WRAPT=$(if $(filter 2.1.%,$*),==1.14.1,$(WRAPT))"
	rm -rf build/matrix/venv-$*
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
