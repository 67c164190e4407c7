# The same verbs by hand and in CI. `make` alone lists them.
#
#   TORCH=2.13.0        version of torch to install and build against
#   UCX=                wheel with UCX, such as libucx-cu13, or `system` for conda's or the system's; without any, the
#                       wheel for torch's CUDA
#   PYTHON=python3      interpreter of the virtual environment
#   VENV=.venv          where that is
#   BACKEND=UCX         what the conformance suites run on; TENSORPIPE is PyTorch's own
#   RUNS=1              how many times they run
#   JOBS=2              how many Python tests run at a time; 0 for one after the other in one process, as for a debugger
#   FUZZ_SECONDS=20     how long hostile bytes are tried
#   MINUTES=1           how long workers are killed, stopped and cut off
#   SEED=               which of them and when; without any, a new one, which is printed
#   TRIALS=             of verbs; without any, all
#   MUTANTS=            their names; without any, all
#   WHEELS=             folder with what gpu-check needs without a network; gpu-prepare fills it
#   PART=first          of gpu-check: first, and then second; or rehearse-all, without a GPU
#   STEPS=              of that part; without any, all
#   TORCHES=            versions of torch for the matrix; without any, the oldest supported and PyPI's newest
#   PYTHONS=            versions of Python for the wheels, by default those of setup.cfg on PATH; paths for the matrix
#   VERB=               what the matrix makes; without any, all C++ and Python tests
#   PACKAGES_URL=       address of the wheels for the index; without any, it lies beside them
#
# pip's own variables work too: PIP_EXTRA_INDEX_URL, for one, with TORCH=2.13.0+cpu.
TORCH ?= 2.13.0
UCX ?=
PYTHON ?= python3
VENV ?= .venv
BACKEND ?= UCX
RUNS ?= 1
JOBS ?= 2
FUZZ_SECONDS ?= 20
MINUTES ?= 1
SEED ?=
TORCHES ?=
PYTHONS ?=
PACKAGES_URL ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

ifeq ($(UCX),system)
export TORCH_UCX_RPC_UCX := system
endif

PY := $(VENV)/bin/python
# Of this environment, activated or not: cmake, ninja, ctest, ruff, clang-format.
export PATH := $(abspath $(VENV))/bin:$(PATH)
PIP := $(PY) -m pip --disable-pip-version-check
NEEDS := tools/build_environment.py requirements
# How each test ended, for tools/every_file_ran.py.
REPORTS := build/reports
# The tests wait more than they compute, so that two at a time take half as long, on two cores too.
PYTEST := $(PY) -m pytest --numprocesses $(JOBS) --dist worksteal
# What `make test-libraries` runs.
LIBRARIES ?= tests/libraries

# Each of these files says that something is installed; they live in the environment and go with it.
ENVIRONMENT := $(VENV)/.torch-$(TORCH)-$(or $(UCX),wheel)
EDITABLE := $(VENV)/.editable-$(TORCH)-$(or $(UCX),wheel)

.PHONY: help build demo test test-cpp test-light-cpp test-python test-tooling test-libraries test-examples test-launchers
.PHONY: test-conformance conformance conformance-cuda nightly test-field sanitize sanitize-light soak soak-training fuzz
.PHONY: mutants verbs matrix fresh gpu-prepare gpu-check gpu-rehearse bench bench-record docs lint tidy format
.PHONY: wheel wheels sdist index clean distclean

help: ## List the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' Makefile

build: $(ENVIRONMENT) ## Make .venv with torch and UCX, compile, install the package into it
	@$(PY) setup.py --quiet build_ext --inplace
	@$(MAKE) --no-print-directory --silent $(EDITABLE)
	@$(PY) -m compileall -q torch_ucx_rpc

$(ENVIRONMENT): setup.cfg pyproject.toml
	@$(PYTHON) tools/build_environment.py toolchain $(TORCH)
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	@$(PIP) install torch==$(TORCH) $$($(PY) $(NEEDS) build install)
ifneq ($(UCX),system)
	@$(PIP) install $(or $(UCX),$$($(PY) tools/build_environment.py libucx))
endif
	@rm -f $(VENV)/.torch-* $(VENV)/.editable-*
	@touch $@

# What the extension is made of is setup.py's and CMake's affair; pip only has to know the package and where it is.
$(EDITABLE): setup.cfg pyproject.toml setup.py
	@$(PIP) --quiet install --no-build-isolation --no-deps --editable .
	@touch $@

# An extra of setup.cfg: test, examples, lint
$(VENV)/.extra-%: setup.cfg | $(ENVIRONMENT)
	@$(PIP) --quiet install $$($(PY) $(NEEDS) $*)
	@touch $@

# Of the target $(1), with a report of the name $(2), and the options $(3) of ctest.
define run-cpp-tests
directory=$$($(PY) tools/build_environment.py directory); \
grep -q TORCH_UCX_RPC_TESTS:BOOL=ON $$directory/CMakeCache.txt || cmake -DTORCH_UCX_RPC_TESTS=ON $$directory; \
cmake --build $$directory --target $(1); \
mkdir -p $(REPORTS); \
ctest --test-dir $$directory --output-on-failure --no-tests=error --parallel $$(nproc) \
  --output-junit $(abspath $(REPORTS))/$(2).xml $(3)
endef

test: build ## Test the package: the Python tests, and the C++ tests that compile without torch's headers
	@$(MAKE) --no-print-directory --keep-going test-light-cpp test-python

test-cpp: build ## All C++ tests: run them after a change to C++. They take minutes to compile
	@$(call run-cpp-tests,cpp_tests,ctest)

test-light-cpp: build
	@$(call run-cpp-tests,light_cpp_tests,light,--label-regex light)

test-python: build $(VENV)/.extra-test
	@$(PYTEST) -m "not field" --junit-xml=$(REPORTS)/pytest.xml

test-tooling: build $(VENV)/.extra-test ## Tests of the project's own tools, pages and layers
	@$(PYTEST) tests/tooling -m "not field" --junit-xml=$(REPORTS)/tooling.xml

test-libraries: build $(VENV)/.extra-test ## Tests of the libraries: services, reduction, pipelines, checkpoints
	@$(PYTEST) $(LIBRARIES) --junit-xml=$(REPORTS)/libraries.xml

test-examples: build $(VENV)/.extra-test ## The examples and the tutorials, run as their pages say
	@$(PYTEST) tests/examples --junit-xml=$(REPORTS)/examples.xml

test-launchers: build $(VENV)/.extra-test ## Jobs under Slurm, Open MPI, MPICH and torchrun, on virtual hosts; needs root
	@$(PY) -m pytest tests/launchers -m "not field" --junit-xml=$(REPORTS)/launchers.xml

test-conformance: build $(VENV)/.extra-test ## PyTorch's own RPC suites
	@$(PYTEST) tests/conformance --rpc-backend $(BACKEND) --junit-xml=$(REPORTS)/conformance.xml

# Each of these verbs runs whatever the others find. The soaks and the fuzzer run longer than by themselves. The mutants
# take hours: nightly.yml has a machine of their own for them.
nightly: build ## The checks that take too long for CI: test-field, sanitize, the soaks, fuzz, gpu-rehearse
	@$(MAKE) --no-print-directory --keep-going MINUTES=10 FUZZ_SECONDS=600 $(NIGHTLY)

NIGHTLY := test-field sanitize soak soak-training fuzz gpu-rehearse

test-field: build $(VENV)/.extra-test $(VENV)/.extra-docs ## Python tests that need minutes or much memory; some need root and launchers
	@$(PY) -m pytest tests/unit tests/e2e tests/tooling tests/launchers -m field --junit-xml=$(REPORTS)/field.xml

conformance: ## The same suites RUNS times, for the page docs/conformance.md
conformance-cuda: ## PyTorch's suites that need GPUs, for the same page
conformance: SUITES := tests/conformance
conformance-cuda: SUITES := tests/conformance/test_cuda_suites.py --cuda
conformance conformance-cuda: build $(VENV)/.extra-test
	@reports=$$(mktemp -d); trap 'rm -r "$$reports"' EXIT; status=0; \
	for run in $$(seq $(RUNS)); do \
	  $(PY) -m pytest $(SUITES) --rpc-backend $(BACKEND) \
	    --conformance-report $$reports/$$run.json || status=$$?; \
	done; \
	if [ -e $$reports/1.json ]; then $(PY) -m tests.conformance.page record $$reports/*.json; fi; \
	exit $$status

FUZZED := tests/fuzz/wire_fuzzer.cpp $(wildcard torch_ucx_rpc/csrc/wire/*.cpp) torch_ucx_rpc/csrc/base/hmac.cpp

build/fuzz/wire_fuzzer: $(FUZZED) $(wildcard torch_ucx_rpc/csrc/wire/*.h torch_ucx_rpc/csrc/base/*.h)
	@command -v clang++ > /dev/null || \
	  { echo "make fuzz needs clang with libFuzzer (Debian, Ubuntu: apt install clang)"; exit 1; }
	@mkdir -p $(@D)
	@clang++ -std=c++20 -O2 -g -Wall -Wextra -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
	  -Itorch_ucx_rpc/csrc $(FUZZED) -o $@

# What is found is kept in build/fuzz for the next run; an input that fails is written there, and named.
fuzz: build/fuzz/wire_fuzzer ## Hostile bytes against the wire format's readers, for FUZZ_SECONDS; needs clang
	@mkdir -p build/fuzz/corpus
	@build/fuzz/wire_fuzzer -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -malloc_limit_mb=16 -rss_limit_mb=1024 \
	  -artifact_prefix=build/fuzz/ -print_final_stats=1 build/fuzz/corpus tests/fuzz/corpus 2> build/fuzz/log \
	  && grep number_of_executed_units build/fuzz/log || { tail -50 build/fuzz/log; exit 1; }

soak: build $(VENV)/.extra-test ## Workers on virtual hosts, killed and cut off for MINUTES; needs root. A report in build/soak
	@$(PY) -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) --report build/soak
	@$(PY) -m tests.soak.serving --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

soak-training: build $(VENV)/.extra-test ## Trainers of one model, killed and started anew for MINUTES: all copies must stay equal
	@$(PY) -m tests.soak.training --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# Nice: two emulated processors keep two cores busy.
verbs: $(ENVIRONMENT) ## Two emulated machines with Soft-RoCE: calls over verbs, kills, cuts; needs root, qemu and mmdebstrap
	@nice -n 10 $(PY) -m tests.verbs --folder build/verbs $(TRIALS)

mutants: build $(VENV)/.extra-test ## Bugs put into a copy of the sources, in Python and in C++: their tests must fail
	@$(PY) -m tests.mutants $(MUTANTS)

# In build folders of their own. What is found fails a test, whose output says what and where. ThreadSanitizer and UCX's
# hooks for memory get into each other's way, and the barriers of OpenMP, which torch computes with, are none that it
# knows.
sanitize: ## C++ tests under AddressSanitizer and UBSan, and again under ThreadSanitizer
	@$(MAKE) --no-print-directory --keep-going sanitize-address sanitize-thread

sanitize-light: ## The C++ tests that compile without torch's headers, under AddressSanitizer and UBSan: minutes
	@$(MAKE) --no-print-directory sanitize-address \
	  SANITIZED=light_cpp_tests CTEST="--label-regex light --output-junit $(abspath $(REPORTS))/sanitize.xml"

SANITIZED := cpp_tests
CTEST :=

sanitize-%: $(ENVIRONMENT)
	@cmake --log-level=WARNING -G Ninja -S . -B build/$@ -DCMAKE_MAKE_PROGRAM=$$(command -v ninja) \
	  -DPython_EXECUTABLE=$(abspath $(PY)) -DTORCH_UCX_RPC_UCX=$${TORCH_UCX_RPC_UCX:-} \
	  -DTORCH_UCX_RPC_TESTS=ON -DTORCH_UCX_RPC_SANITIZE=$*
	@cmake --build build/$@ --target $(SANITIZED)
	@mkdir -p $(REPORTS)
	@UCX_MEM_EVENTS=n UCX_MEM_MMAP_HOOK_MODE=none OMP_NUM_THREADS=1 \
	  ctest --test-dir build/$@ --output-on-failure --no-tests=error --parallel $$(nproc) $(CTEST)

# With the torch of PYTHON, not TORCH's: the whole environment may lie on a machine without a network. Beside a torch
# with CUDA 13, which today's are, unless UCX is given.
GPU_UCX := $(if $(filter command environment,$(firstword $(origin UCX))),$(UCX),libucx-cu13)

gpu-prepare: build ## Fill WHEELS with what gpu-check needs on a machine without a network, the compiled extension included
	@$(PY) tools/gpu_check.py prepare $(or $(WHEELS),wheels) --ucx $(GPU_UCX)

gpu-check: ## PART of what needs a GPU, on one and with the CUDA torch of PYTHON: each less than 9 minutes; WHEELS=folder without a network
	@$(PYTHON) tools/gpu_check.py $(or $(PART),first) --ucx $(GPU_UCX) $(if $(WHEELS),--wheels $(WHEELS)) \
	  $(if $(STEPS),--steps $(STEPS))

gpu-rehearse: build $(VENV)/.extra-test ## The ways of gpu-check without a GPU, in short: some tests, one of which hangs
	@$(PY) tools/gpu_check.py rehearse

fresh: ## The README's commands in a bare Debian or Ubuntu, made for this and removed after; needs root and mmdebstrap
	@tools/fresh.sh

matrix: ## Build and test with several versions of torch, and of Python, each in a copy of its own
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	@$(PY) tools/matrix.py $(TORCHES) $(if $(PYTHONS),--python $(PYTHONS)) $(if $(VERB),--verb "$(VERB)")

BENCH_PEERS := .venv-peers

bench: build $(VENV)/.extra-bench ## Benchmarks against TensorPipe, the short set: ten minutes
	@$(PY) -m benchmarks --json build/bench.json

# On a machine that does nothing else; half an hour. Missed bounds are recorded like the others, and fail this. So do
# contenders that fail, which cost the others nothing.
bench-record: build $(VENV)/.extra-bench $(BENCH_PEERS)/.done ## All benchmarks; their results, the tables and plots of the docs
	@status=0; \
	BENCH_PEERS_PYTHON=$(BENCH_PEERS)/bin/python $(PY) -m benchmarks --all --minutes 20 --record two_cores || status=$$?; \
	taskset -c 0 $(PY) -m benchmarks --record one_core $(ONE_CORE) || status=$$?; \
	$(PY) -m benchmarks.tables --write || status=$$?; \
	$(PY) -m benchmarks.plot benchmarks/results/two_cores.json || status=$$?; \
	exit $$status

ONE_CORE := small_calls large_tensors parameter_server pipeline

# In an environment of their own: UCXX wants an older UCX, and Monarch needs a torch. What does not install is left out.
$(BENCH_PEERS)/.done:
	@$(PYTHON) -m venv $(BENCH_PEERS)
	@$(BENCH_PEERS)/bin/pip --quiet install numpy
	@for peer in ucxx-cu12 grpcio mpi4py ray "torch==$(TORCH) torchmonarch"; do \
	  $(BENCH_PEERS)/bin/pip --quiet install $$peer || true; done
	@touch $@

demo: build $(VENV)/.extra-examples ## Train a model split over two workers
	@$(PY) examples/digits.py

# A page without a place in the navigation, a link that leads nowhere, or a public name without a docstring fails it;
# but not with --quiet, which hides warnings from the strict build too.
docs: $(VENV)/.extra-docs ## Build the site of the documentation into build/site
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build
	@echo "build/site/index.html; with its search: $(PY) -m http.server --directory build/site"

CXX_FILES = $$(find torch_ucx_rpc/csrc tests/cpp tests/cuda_stub tests/fuzz -name '*.h' -o -name '*.cpp')

lint: $(VENV)/.extra-lint ## Style, formats, types and docstrings, C++ and Python
	@ruff check
	@ruff format --check
	@mypy
	@$(PY) tools/site.py
	@clang-format --dry-run -Werror $(CXX_FILES)

tidy: build $(VENV)/.extra-tidy ## Advice of clang-tidy on the C++ sources; takes minutes
	@clang-tidy --quiet -p $$($(PY) tools/build_environment.py directory) $$(find torch_ucx_rpc/csrc -name '*.cpp')

format: $(VENV)/.extra-lint ## Rewrite the sources in the project's formats
	@ruff check --fix
	@ruff format
	@clang-format -i $(CXX_FILES)

wheel: $(ENVIRONMENT) ## Build a wheel for this Python and torch into dist/
	@rm -rf build/lib.*
	@TORCH_UCX_RPC_PIN=1 $(PIP) --quiet wheel --no-build-isolation --no-deps --wheel-dir dist .

RELEASE_TOOLS := build/release-tools

$(RELEASE_TOOLS)/.done: setup.cfg
	@$(PYTHON) -m venv $(RELEASE_TOOLS)
	@$(RELEASE_TOOLS)/bin/pip --disable-pip-version-check --quiet install $$($(PYTHON) $(NEEDS) release)
	@touch $@

wheels: $(RELEASE_TOOLS)/.done ## Build the wheels of a release into dist/: for TORCHES and PYTHONS; without any, all
	@$(RELEASE_TOOLS)/bin/python tools/wheels.py $(if $(TORCHES),--torch $(TORCHES)) $(if $(PYTHONS),--python $(PYTHONS))

sdist: $(RELEASE_TOOLS)/.done ## Build the source distribution into dist/
	@$(RELEASE_TOOLS)/bin/python -m build --sdist --outdir dist .

index: ## Make dist/index, a package index of what is in dist/ or, under the same names, at PACKAGES_URL
	@$(PYTHON) tools/index.py $(if $(PACKAGES_URL),--packages-url $(PACKAGES_URL))

clean: ## Remove what the build wrote; the environment stays
	@rm -rf build dist *.egg-info torch_ucx_rpc/*.so torch_ucx_rpc/_build_info.py torch_ucx_rpc/_torch_headers.txt $(VENV)/.editable-*

distclean: clean ## Remove the environment too
	@rm -rf $(VENV)
