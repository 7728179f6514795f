# Two commands are enough from a fresh clone: `make demo` and `make test`. Each makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TYPED := src/phalanx/errors.py src/phalanx/log.py src/phalanx/layout.py src/phalanx/cluster src/phalanx/plan

# Two tests at a time: many of them wait, for ranks that set up their connections or for others that come late on purpose.
SIDE_BY_SIDE := --numprocesses 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format bench-train clean

help:
	@echo "make demo         train a small Llama on two books, on two processes (3 to 5 minutes)"
	@echo "make test         the fixed cover of tests (under 15 minutes on 2 cores)"
	@echo "make test-all     every cell; writes the tables into README.md and docs/checkpoints.md"
	@echo "make lint         ruff, and mypy on the ground floor and the plan"
	@echo "make format       rewrite the files as ruff wants them"
	@echo "make bench-train  time and memory against PyTorch DDP, FSDP2 and DeepSpeed"

$(READY): constraints.txt pyproject.toml
	@echo "Installing into $(VENV) (first time, or the settings changed)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; try: make PYTHON=python3.11 ...")'
	@$(PYTHON) -m venv $(VENV)
	@# torch first and by its exact name, so that a CPU build is taken where the index or a local folder has one.
	@$(BIN)/pip install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(READY)

# Ranks share the cores: one thread for each, or they wait for one another.
test test-all: export OMP_NUM_THREADS = 1

demo: $(READY)
	$(BIN)/phalanx train recipes/demo.toml --overwrite

test: $(READY)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow and not gpu"

test-all: $(READY)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --support-table=README.md --load-table=docs/checkpoints.md

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(wildcard $(TYPED))

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-train: $(READY)
	$(BIN)/python -m bench.train

clean:
	rm -rf $(VENV) runs .pytest_cache .ruff_cache .mypy_cache
