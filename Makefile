# The same targets by hand and in CI. `make` alone lists them. tools/ has programs for rarer work.
#
#   TORCH=2.13.0        version of torch to install and build against
#   UCX=                wheel with UCX, such as libucx-cu13, or `system` for conda's or the system's UCX; if empty, the
#                       wheel for torch's CUDA
#   PYTHON=python3      interpreter of the virtual environment
#   VENV=.venv          folder of the virtual environment
#   JOBS=               how many Python tests run at a time; 0: one after the other in one process, for a debugger
#   BACKEND=UCX         the backend of test-conformance; TENSORPIPE is PyTorch's own
#
# pip's own variables work too, such as PIP_EXTRA_INDEX_URL for TORCH=2.13.0+cpu.
TORCH ?= 2.13.0
UCX ?=
PYTHON ?= python3
VENV ?= .venv
JOBS ?=
BACKEND ?= UCX

# Without stored bytecode each worker of a test compiles the test's modules again. Without buffers Python writes a line
# and its end apart, and lines of several processes mix.
unexport PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

ifeq ($(UCX),system)
export TORCH_UCX_RPC_UCX := system
endif

PY := $(VENV)/bin/python
# The programs of this environment come first, activated or not: cmake, ninja, ctest, ruff, clang-format.
export PATH := $(abspath $(VENV))/bin:$(PATH)
PIP := $(PY) -m pip --disable-pip-version-check
NEEDS := tools/build_environment.py requirements
# Folder of the tests' reports, for tools/every_file_ran.py.
REPORTS := build/reports
# Tests wait more than they compute: three at a time fill two cores. Programs that import torch compute more.
LANES := 3
test-examples test-launchers: LANES := 2
PYTEST = $(PY) -m pytest --numprocesses $(or $(JOBS),$(LANES)) --dist worksteal
# The tests of test-libraries.
LIBRARIES ?= tests/libraries
# Options of ctest for test-cpp.
CTEST ?=

# Each of these files says that something is installed. They are in the environment, and are deleted with it.
ENVIRONMENT := $(VENV)/.torch-$(TORCH)-$(or $(UCX),wheel)
EDITABLE := $(VENV)/.editable-$(TORCH)-$(or $(UCX),wheel)

.PHONY: help environment build demo clean test test-cpp test-light-cpp test-python test-tooling test-libraries
.PHONY: test-examples test-launchers test-conformance test-field nightly lint format docs bench

help: ## List the targets
	@awk -F ':.*## ' '/^##@ / { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 } \
	  END { print "\nPrograms for rarer work are in tools/; --help says what each does." }' Makefile

##@ Build

build: $(ENVIRONMENT) ## Make .venv with torch and UCX, compile the package, and install it there
	@$(PY) setup.py --quiet build_ext --inplace
	@$(MAKE) --no-print-directory --silent $(EDITABLE)
	@$(PY) -m compileall -q torch_ucx_rpc

demo: build $(VENV)/.extra-examples ## Train a model split over two workers, on UCX and on TensorPipe
	@$(PY) examples/digits.py

clean: ## Remove the files of the build, but not .venv
	@rm -rf build dist *.egg-info torch_ucx_rpc/*.so torch_ucx_rpc/_build_info.py torch_ucx_rpc/_torch_headers.txt $(VENV)/.editable-*

environment: $(ENVIRONMENT)

$(ENVIRONMENT): setup.cfg pyproject.toml
	@$(PYTHON) tools/build_environment.py toolchain $(TORCH)
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	@$(PIP) install torch==$(TORCH) $$($(PY) $(NEEDS) build install)
ifneq ($(UCX),system)
	@$(PIP) install $(or $(UCX),$$($(PY) tools/build_environment.py libucx))
endif
	@rm -f $(VENV)/.torch-* $(VENV)/.editable-*
	@touch $@

# setup.py and CMake build the extension. pip only has to know the package and where it is.
$(EDITABLE): setup.cfg pyproject.toml setup.py
	@$(PIP) --quiet install --no-build-isolation --no-deps --editable .
	@touch $@

# An extra of setup.cfg, such as test or docs.
$(VENV)/.extra-%: setup.cfg | $(ENVIRONMENT)
	@$(PIP) --quiet install $$($(PY) $(NEEDS) $*)
	@touch $@

##@ Test

# Builds the target $(1), and runs ctest with the options $(3) and a report of the name $(2).
define run-cpp-tests
directory=$$($(PY) tools/build_environment.py directory); \
grep -q TORCH_UCX_RPC_TESTS:BOOL=ON $$directory/CMakeCache.txt || cmake -DTORCH_UCX_RPC_TESTS=ON $$directory; \
cmake --build $$directory --target $(1); \
mkdir -p $(REPORTS); \
ctest --test-dir $$directory --output-on-failure --no-tests=error --parallel $$(nproc) \
  --output-junit $(abspath $(REPORTS))/$(2).xml $(3)
endef

test: build ## The package: its Python tests, and the C++ tests that compile without torch's headers
	@$(MAKE) --no-print-directory --keep-going test-light-cpp test-python

test-cpp: build ## All C++ tests. Run them after any change to C++; they take minutes to compile
	@$(call run-cpp-tests,cpp_tests,ctest,$(CTEST))

test-light-cpp: build
	@$(call run-cpp-tests,light_cpp_tests,light,--label-regex light)

test-python: build $(VENV)/.extra-test
	@$(PYTEST) -m "not field" --junit-xml=$(REPORTS)/pytest.xml

test-tooling: build $(VENV)/.extra-test ## The project's own tools, pages and layers
	@$(PYTEST) tests/tooling -m "not field" --junit-xml=$(REPORTS)/tooling.xml

test-libraries: build $(VENV)/.extra-test ## Services, reduction, pipelines, checkpoints
	@$(PYTEST) $(LIBRARIES) --junit-xml=$(REPORTS)/libraries.xml

test-examples: build $(VENV)/.extra-test ## The examples and the tutorials, run as their pages say
	@$(PYTEST) tests/examples --junit-xml=$(REPORTS)/examples.xml

test-launchers: build $(VENV)/.extra-test ## Jobs under Slurm, Open MPI, MPICH and torchrun; needs root
	@$(PYTEST) tests/launchers -m "not field" --junit-xml=$(REPORTS)/launchers.xml

test-conformance: build $(VENV)/.extra-test ## PyTorch's own RPC suites, on the backend BACKEND
	@$(PYTEST) tests/conformance --rpc-backend $(BACKEND) --junit-xml=$(REPORTS)/conformance.xml

test-field: build $(VENV)/.extra-test $(VENV)/.extra-docs ## Python tests that take minutes or much memory; some need root
	@$(PY) -m pytest tests/unit tests/e2e tests/tooling tests/launchers -m field --junit-xml=$(REPORTS)/field.xml

# Each check runs, even if an earlier one has failed. With $(MAKE) in place of make, `make -n` would run all of them.
nightly: build ## The checks that take too long for CI: test-field, schedules, sanitizers, soaks, fuzzing, a GPU rehearsal
	@status=0; \
	make --no-print-directory test-field || status=1; \
	SCHEDULES=20 $(PYTEST) tests/unit -k schedule || status=1; \
	SCHEDULES=3 make --no-print-directory test-light-cpp || status=1; \
	tools/sanitize.sh || status=1; \
	tools/soak.sh --minutes 10 || status=1; \
	tools/soak.sh --resuming --minutes 10 || status=1; \
	tools/soak.sh --training --minutes 10 || status=1; \
	tools/fuzz.sh --seconds 600 || status=1; \
	$(PY) tools/gpu_check.py rehearse || status=1; \
	exit $$status

##@ Style and pages

CXX_FILES = $$(find torch_ucx_rpc/csrc tests/cpp tests/cuda_stub tests/fuzz -name '*.h' -o -name '*.cpp')

lint: $(VENV)/.extra-lint ## Check style, formats, types and docstrings, C++ and Python
	@ruff check
	@ruff format --check
	@mypy
	@$(PY) tools/site.py
	@clang-format --dry-run -Werror $(CXX_FILES)

format: $(VENV)/.extra-lint ## Rewrite the sources in the project's formats
	@ruff check --fix
	@ruff format
	@clang-format -i $(CXX_FILES)

# Without --quiet, which would hide warnings from the strict build too.
docs: $(VENV)/.extra-docs ## Build the site of the documentation in build/site
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build
	@echo "build/site/index.html; with its search: $(PY) -m http.server --directory build/site"

##@ Measure

bench: build $(VENV)/.extra-bench ## Compare UCX with TensorPipe, in ten minutes
	@$(PY) -m benchmarks --json build/bench.json
