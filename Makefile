# The README's two commands, `make demo` and `make test`, work on a fresh checkout: the environment is made first, and
# again only when what it is built from changes.
#
#   make demo PYTHON=python3.12    choose the Python
#   make test VENV=/tmp/venv       choose where the environment lies
#   make test ARGS="-k warmup -x"  pass arguments to pytest
#   make test WORKERS=0            one test after the other
#   make test TORCH=1              with PyTorch installed, whose tests are skipped otherwise
#   make test-all HUB=1            with KerasHub installed, the same

VENV ?= .venv
EXTRAS ?= cpu,dev,docs,notebooks,translation
# The newest of the supported Pythons that runs: a name on the PATH may be a version manager's shim for one it lacks.
RUNS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
            if $$p -c '$(RUNS)' 2>/dev/null; then command -v $$p; break; fi; done)
ARGS ?=
# One more than there are cores: tests/harness/side_by_side.py.
WORKERS ?= auto
COMMA := ,

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Optional parts: each a package of keras_ddl with its tests (keras_ddl/parts.py).
PARTS := $(patsubst %/part.toml,%,$(wildcard */part.toml */*/part.toml))
# What the libraries are built from, and the environment is made for: Python files are used where they are.
SOURCES := pyproject.toml setup.cfg $(shell find native -type f \( -name '*.cc' -o -name '*.h' -o -name '*.txt' \
             -o -name '*.cmake' \) 2>/dev/null)
# What the packaging tests install; kept while its sources stay the same.
WHEEL ?= build/wheel

# Container images often set this. Then every rank compiles all of TensorFlow's modules anew: 8 s of a core instead of 3.
export PYTHONDONTWRITEBYTECODE :=

# mpirun of Open MPI refuses root (as in a container) unless told so.
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1

.PHONY: help setup wheel demo test test-parts test-all test-slurm test-versions test-aarch64 breakages mutants docs lint format clean
.DEFAULT_GOAL := help

help: ## show this
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 17

setup: $(STAMP) ## make the virtual environment (VENV=.venv) and install keras_ddl into it

wheel: $(BIN)/python ## build the wheel for machines without a compiler into WHEEL=build/wheel; keep it, and they need none
	$(BIN)/python tools/wheel.py $(WHEEL)

demo: $(STAMP) ## train on real digits with 2 ranks, export, predict in a clean process
	@$(BIN)/python examples/demo.py

test: $(STAMP) ## run the tests of the core, and one of each part; ARGS="-k name" chooses
	$(BIN)/pytest -n $(WORKERS) tests --ignore tests/project $(wildcard $(PARTS:=/tests/test_smoke.py)) $(ARGS)

test-parts: $(STAMP) wheel ## run the tests of the parts, and of docs, examples, notebooks, benchmarks and the package
	$(BIN)/pytest -n $(WORKERS) tests/project $(wildcard $(PARTS:=/tests)) $(ARGS)

test-all: $(STAMP) wheel ## run every test, also what takes minutes, many ranks or much memory
	$(BIN)/pytest -n $(WORKERS) -m '' tests $(wildcard $(PARTS:=/tests)) $(ARGS)

test-slurm: $(STAMP) wheel ## run jobs in a Slurm of its own on this machine, as root, where Debian's packages of it are
	$(BIN)/pytest -n 0 -m slurm tests/project/slurm $(ARGS)

test-versions: $(STAMP) ## try pairs of Keras and TensorFlow, write the table in docs/install.md; ARGS="3.14+2.21" chooses
	@$(BIN)/python tools/versions.py $(ARGS)

breakages: $(STAMP) ## break a line at a time and see whether tests notice; an hour and more. ARGS="--only serving" chooses
	@$(BIN)/python tools/breakages.py $(ARGS)

mutants: $(STAMP) ## change the rules of the cut one at a time and see whether its tests notice; ARGS="--all" for hours
	@$(BIN)/python tools/mutants.py $(ARGS)

test-aarch64: ## build the native tests for 64-bit ARM and run them by qemu; installs nothing
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null && [ -d /usr/src/googletest ] || { \
	  echo "Needed on Debian and Ubuntu: apt-get install cmake ninja-build g++-aarch64-linux-gnu qemu-user libgtest-dev"; \
	  exit 1; }
	cmake -S native -B build/aarch64 -G Ninja -DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/native/cmake/aarch64.cmake \
	  -DKERAS_DDL_TESTS=ON -DKERAS_DDL_MPI=OFF -DKERAS_DDL_TF=OFF
	cmake --build build/aarch64
	ctest --test-dir build/aarch64 --output-on-failure -j 2 $(ARGS)

docs: $(STAMP) ## one site of docs/ and the docstrings in build/site; a broken link is an error
	TF_CPP_MIN_LOG_LEVEL=3 TF_ENABLE_ONEDNN_OPTS=0 $(BIN)/python -m sphinx -q -W --keep-going -E \
	  -c docs -d build/doctrees . build/site
	@echo "open build/site/docs/index.html"

lint: $(STAMP) ## ruff, mypy, clang-format and the rules of tools/structure
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=tools $(BIN)/python -m structure
	@# As it is installed: export/ is keras_ddl.export.
	rm -rf build/typed && mkdir -p build/typed/keras_ddl
	ln -s $(CURDIR)/keras_ddl/* $(addprefix $(CURDIR)/,$(PARTS)) build/typed/keras_ddl
	cd build/typed && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p keras_ddl
	git ls-files '*.cc' '*.h' | xargs -r $(BIN)/clang-format --dry-run -Werror

format: $(STAMP) ## format what lint checks
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files '*.cc' '*.h' | xargs -r $(BIN)/clang-format -i

clean: ## remove the environment and everything built
	rm -rf $(VENV) build dist demo-output .pytest_cache .ruff_cache

$(BIN)/python:
	@[ -n "$(PYTHON)" ] || { echo "No Python 3.11, 3.12 or 3.13 was found: install one, or pass PYTHON=..."; exit 1; }
	@$(PYTHON) -c '$(RUNS)' || { \
	  echo "Python 3.11, 3.12 or 3.13 is needed. Received: $(PYTHON), which is $$($(PYTHON) -V 2>&1)." \
	       "Pass PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "venv failed; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install -q --upgrade pip

ifdef TORCH
# PyPI's torch is the CUDA build, several GB: where PyTorch's CPU build is wanted, TORCH has what to give to pip, as in
# TORCH='torch==2.13.0 --index-url ...'. Once it is there, it stays.
test test-parts test-all: $(VENV)/.torch
$(VENV)/.torch: $(STAMP)
	$(BIN)/python -m pip install -q --no-compile $(if $(filter 1,$(TORCH)),'torch>=2.8$(COMMA)<2.16',$(TORCH))
	@touch $@
endif

ifdef HUB
# KerasHub requires tensorflow-text, and that the full tensorflow, which would overwrite tensorflow-cpu.
test test-parts test-all: $(VENV)/.hub
$(VENV)/.hub: $(STAMP)
	$(BIN)/python -m pip install -q --no-compile kagglehub 'kagglesdk==0.1.28' tokenizers sentencepiece regex
	$(BIN)/python -m pip install -q --no-compile --no-deps 'keras-hub==0.32.0'
	@touch $@
endif

$(STAMP): $(BIN)/python $(SOURCES)
	@# Python compiles a module when it is first imported; most of these never are.
	$(BIN)/python -m pip install -q --no-compile --editable ".[$(EXTRAS)]"
	@# For the tests. It requires the full tensorflow, which would overwrite tensorflow-cpu.
	$(BIN)/python -m pip install -q --no-compile --no-deps 'tensorflow-serving-api>=2.21,<2.22'
	@# Once, before ranks that start together all do it.
	@$(BIN)/python -c 'import keras, sklearn, matplotlib' 2>/dev/null || true
	@touch $@
