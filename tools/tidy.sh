#!/usr/bin/env bash
# Prints clang-tidy's advice on the C++ sources. Takes minutes.
#
#   tools/tidy.sh                                      all
#   tools/tidy.sh torch_ucx_rpc/csrc/wire/*.cpp        these
. "$(dirname "$0")/environment.sh"

built tidy
if [ $# = 0 ]; then
  mapfile -t files < <(find torch_ucx_rpc/csrc -name '*.cpp')
  set -- "${files[@]}"
fi
clang-tidy --quiet -p "$(python tools/build_environment.py directory)" "$@"
