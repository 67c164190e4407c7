#!/usr/bin/env bash
# Feeds hostile bytes to the readers of the wire format, under AddressSanitizer and UBSan. Needs clang with libFuzzer
# (apt install clang libclang-rt-dev).
#
#   tools/fuzz.sh                 20 seconds
#   tools/fuzz.sh --seconds 600
#
# The next run continues with the inputs in build/fuzz/corpus. A failing input is written to build/fuzz, and its name
# printed.
. "$(dirname "$0")/environment.sh"

seconds=20
case ${1:-} in
  '') ;;
  --seconds) seconds=$2 ;;
  *) give_up "unknown argument $1; --help lists them" ;;
esac
command -v clang++ > /dev/null || give_up "clang with libFuzzer is missing: apt install clang libclang-rt-dev"

mkdir -p build/fuzz/corpus
clang++ -std=c++20 -O2 -g -Wall -Wextra -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
  -Itorch_ucx_rpc/csrc tests/fuzz/wire_fuzzer.cpp torch_ucx_rpc/csrc/wire/*.cpp torch_ucx_rpc/csrc/base/hmac.cpp \
  -o build/fuzz/wire_fuzzer
build/fuzz/wire_fuzzer -max_total_time="$seconds" -max_len=4096 -malloc_limit_mb=16 -rss_limit_mb=1024 \
  -artifact_prefix=build/fuzz/ -print_final_stats=1 build/fuzz/corpus tests/fuzz/corpus 2> build/fuzz/log &&
  grep number_of_executed_units build/fuzz/log || { tail -50 build/fuzz/log && exit 1; }
