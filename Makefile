# Every target makes the virtual environment first if it is not there, except test-gpu and prove-gpu; PYTHON=, RANKS=, WORKERS=, GPU_WORKERS=,
# SECONDS=, SEED=, MPI=, NEXT_VENV= and OUT= may be set.
PYTHON ?= python3
RANKS ?= 2
WORKERS ?= 3
GPU_WORKERS ?= 4
SECONDS ?= 60
VENV   ?= .venv
CONSTRAINTS ?= constraints.txt
NEXT_VENV   ?= .venv-torch2.15
OUT    ?= out/prove-gpu
BIN    := $(VENV)/bin
LIBRARIES := .venv-ecosystem
TORCHFT := .venv-torchft
READY  := $(VENV)/.ready

.PHONY: train test test-all test-rest test-next-torch test-upstream test-ecosystem test-gpu prove-gpu fuzz chaos differences findings lint types docs diagrams bench build clean
.DEFAULT_GOAL := train

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev,docs,examples,plot]'
	@touch $@

train: $(READY)  ## train on real digits, two ranks, over our own transport
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node=$(RANKS) examples/train_digits.py

# Many tests wait for processes, so three workers use two cores better than two. Workers take tests in order and steal from each
# other: ranks are forked off one process per folder. Bytecode is kept even where the environment says otherwise, or each of
# several hundred processes would compile the package again.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

test: $(READY)  ## run the essential tests, in WORKERS processes: about eight minutes on two cores
	$(PYTEST) -m "not exhaustive"

test-rest: $(READY)  ## run the exhaustive tests, which `make test` leaves out
	$(PYTEST) -m exhaustive

test-all: test test-rest  ## run every test

# torch 2.14 and later reach the back end in another way than torch 2.13.
NEXT_TESTS := private_names python_backend programs registered_memory patches entry_point reconfigure transport window next_torch
test-next-torch:  ## run a small suite of the torch back end with torch 2.15, in the environment NEXT_VENV
	$(MAKE) VENV=$(NEXT_VENV) CONSTRAINTS=constraints-torch2.15.txt $(NEXT_VENV)/.ready
	PYTHONDONTWRITEBYTECODE= $(NEXT_VENV)/bin/python -m pytest -q -n $(WORKERS) --dist loadfile -m "not exhaustive" \
	    $(NEXT_TESTS:%=tests/torch_backend/test_%.py)

test-upstream: $(READY)  ## run torch's own tests, fetched in part, on asyncdist and on gloo; continues where it stopped
	$(BIN)/python tests/upstream/run.py

$(LIBRARIES)/.ready: pyproject.toml constraints.txt tests/ecosystem/requirements.txt
	$(PYTHON) -m venv $(LIBRARIES)
	DS_BUILD_OPS=0 $(LIBRARIES)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	    -r tests/ecosystem/requirements.txt -e .
	@touch $@

# torch 2.14 and later can change the members of a group.
$(TORCHFT)/.ready: pyproject.toml constraints-torch2.15.txt tests/ecosystem/requirements-torchft.txt
	$(PYTHON) -m venv $(TORCHFT)
	$(TORCHFT)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-torch2.15.txt \
	    -r tests/ecosystem/requirements-torchft.txt -e .
	@touch $@

test-ecosystem: $(LIBRARIES)/.ready $(TORCHFT)/.ready  ## run programs of libraries above torch on asyncdist and on gloo; installs 4 GB
	$(LIBRARIES)/bin/python tests/ecosystem/run.py

# The python that runs here if its torch has CUDA, else the virtual environment's if there is one: nothing is fetched.
PYTHON_WITH_CUDA = python=$(PYTHON); \
	$$python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null \
	    || { test ! -x $(BIN)/python || python=$(BIN)/python; }

test-gpu:  ## run the tests that need a GPU, in GPU_WORKERS processes if pytest-xdist is there; says why if they are skipped
	@$(PYTHON_WITH_CUDA); \
	$$python -c 'import xdist' 2>/dev/null && parallel='-n $(GPU_WORKERS) --dist worksteal'; \
	PYTHONPATH=$(CURDIR):$(CURDIR)/transports $$python -m pytest -q -rs $$parallel -c tests/gpu/pytest.ini tests/gpu

prove-gpu:  ## run the GPU tests, the benchmark and whole programs on a GPU in under nine minutes; reports go into OUT
	@$(PYTHON_WITH_CUDA); $$python tests/gpu/prove.py --out '$(OUT)'

fuzz: $(READY)  ## fuzz the parsers, SECONDS each; guided by coverage where atheris is installed
	$(BIN)/python tests/fuzz/fuzz.py --seconds $(SECONDS)

chaos: $(READY)  ## run random worlds of processes with random faults for SECONDS, from SEED (default: a random one)
	$(BIN)/python tests/chaos/chaos.py --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

differences: $(READY)  ## run random programs on asyncdist, gloo, torch's stores and MPI (MPI=a Python with mpi4py) for SECONDS; numpy judges
	OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR $(BIN)/python tests/differences/hunt.py --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(if $(MPI),--mpi $(MPI))

findings:  ## run the findings on software of others, each in a temporary folder with packages of its own
	@failed=; for script in findings/*.sh; do echo "$$script"; $$script || failed="$$failed $$script"; done; \
	test -z "$$failed" || { echo "changed:$$failed"; exit 1; }

lint: $(READY)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/python .ci/blocking_api.py --check

types: $(READY)
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/groups/test_type_checkers.py

docs: $(READY)  ## build the documentation site into build/site; every warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

diagrams: $(READY)  ## draw the diagrams of the pages again after a change; needs npm and Chromium
	$(BIN)/python docs/diagrams/draw.py

bench: $(READY)  ## measure against gloo, raw sockets and, where installed, Open MPI, side by side; for docs/bench
	$(BIN)/asyncdist bench all_reduce reduce_scatter all_gather broadcast all_to_all --ranks $(RANKS) \
	    --transport auto,tcp --registered --awaited --through torch --against available --output docs/bench

build: $(READY)
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) $(NEXT_VENV) $(LIBRARIES) $(TORCHFT) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
