# Every target makes the virtual environment first if it is not there; PYTHON=, RANKS=, WORKERS= and SECONDS= may be set.
PYTHON ?= python3
RANKS ?= 2
WORKERS ?= 3
SECONDS ?= 60
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: train test test-all test-rest test-upstream test-gpu fuzz lint types bench build clean
.DEFAULT_GOAL := train

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,examples,plot]'
	@touch $@

train: $(READY)  ## train on real digits, two ranks, over our own transport
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node=$(RANKS) examples/train_digits.py

# Many tests wait for processes, so three workers use two cores better than two. Workers take tests in order and steal from each other: ranks are forked off one process per folder. Bytecode is kept even
# where the environment says otherwise, or each of several hundred processes would compile the package again.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

test: $(READY)  ## run the essential tests, in WORKERS processes: at most five minutes on two cores
	$(PYTEST) -m "not exhaustive"

test-rest: $(READY)  ## run the exhaustive tests, which `make test` leaves out
	$(PYTEST) -m exhaustive

test-all: test test-rest  ## run every test

test-upstream: $(READY)  ## run torch's own tests on asyncdist and on gloo, 20 minutes on two cores; continues where it stopped
	$(BIN)/python tests/upstream/run.py

# By the python that runs here if its torch has CUDA, else by the virtual environment if there is one: nothing is fetched.
test-gpu:  ## run the tests that need a GPU; says why if they are skipped
	@python=$(PYTHON); \
	$$python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null \
	    || { test ! -x $(BIN)/python || python=$(BIN)/python; }; \
	PYTHONPATH=$(CURDIR):$(CURDIR)/transports $$python -m pytest -q -rs -c tests/gpu/pytest.ini tests/gpu

fuzz: $(READY)  ## fuzz the parsers, SECONDS each; guided by coverage where atheris is installed
	$(BIN)/python tests/fuzz/fuzz.py --seconds $(SECONDS)

lint: $(READY)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

bench: $(READY)  ## measure against gloo, raw sockets and, where installed, Open MPI, side by side; for docs/bench
	$(BIN)/asyncdist bench all_reduce reduce_scatter all_gather broadcast all_to_all --ranks $(RANKS) \
	    --transport auto,tcp --registered --awaited --through torch --against available --output docs/bench

build: $(READY)
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
