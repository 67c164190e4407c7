#!/usr/bin/env bash
# Compiles the product and its C++ tests with sanitizers, and runs the tests.
#
#   tools/sanitize.sh                all: under AddressSanitizer, LeakSanitizer and UBSan, then under ThreadSanitizer
#   tools/sanitize.sh address        the first three
#   tools/sanitize.sh thread         the last one
#   tools/sanitize.sh light          the tests that compile without torch's headers, under the first three: minutes
#   tools/sanitize.sh thread -R call_table     options of ctest
#
# The build folders are build/sanitize-address and build/sanitize-thread. A second run compiles only the changes. To run
# one test: OMP_NUM_THREADS=1 build/sanitize-thread/tests/agent_faults_test --gtest_filter='*Death*'
. "$(dirname "$0")/environment.sh"

# sanitize KIND TARGET OPTION-OF-CTEST...
sanitize() {
  local folder=build/sanitize-$1
  cmake --log-level=WARNING -G Ninja -S . -B "$folder" -DCMAKE_MAKE_PROGRAM="$(command -v ninja)" \
    -DPython_EXECUTABLE="$(command -v python)" -DTORCH_UCX_RPC_UCX="${TORCH_UCX_RPC_UCX:-}" \
    -DTORCH_UCX_RPC_TESTS=ON -DTORCH_UCX_RPC_SANITIZE="$1"
  cmake --build "$folder" --target "$2"
  # UCX's memory hooks conflict with ThreadSanitizer. ThreadSanitizer does not know the barriers of OpenMP, which torch
  # computes with.
  UCX_MEM_EVENTS=n UCX_MEM_MMAP_HOOK_MODE=none OMP_NUM_THREADS=1 \
    ctest --test-dir "$folder" --output-on-failure --no-tests=error --parallel "$(nproc)" "${@:3}"
}

kind=${1:-all}
[ $# = 0 ] || shift
environment
case $kind in
  address | thread) sanitize "$kind" cpp_tests "$@" ;;
  light) sanitize address light_cpp_tests --label-regex light "$@" ;;
  all)
    status=0
    sanitize address cpp_tests || status=1
    sanitize thread cpp_tests || status=1
    exit "$status"
    ;;
  *) give_up "unknown sanitizer $kind; --help lists them" ;;
esac
