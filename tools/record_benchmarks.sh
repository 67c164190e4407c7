#!/usr/bin/env bash
# Runs all benchmarks, on a machine that does nothing else. Writes benchmarks/results, and the tables and plots of the
# docs. Half an hour.
#
#   tools/record_benchmarks.sh
#
# Missed bounds are recorded like the others, and fail this. So do contenders that fail.
. "$(dirname "$0")/environment.sh"

# The other libraries have an environment of their own: UCXX wants an older UCX, and Monarch needs a torch. A library
# that cannot be installed is left out.
peers=.venv-peers
if [ ! -e "$peers/.done" ]; then
  python3 -m venv "$peers"
  "$peers/bin/pip" --quiet install numpy
  for library in ucxx-cu12 grpcio mpi4py ray "torch==${TORCH:-2.13.0} torchmonarch"; do
    "$peers/bin/pip" --quiet install $library || true
  done
  touch "$peers/.done"
fi

built bench
status=0
BENCH_PEERS_PYTHON=$peers/bin/python python -m benchmarks --all --minutes 20 --record two_cores || status=$?
taskset -c 0 python -m benchmarks --record one_core small_calls large_tensors parameter_server pipeline || status=$?
python -m benchmarks.tables --write || status=$?
python -m benchmarks.plot benchmarks/results/two_cores.json || status=$?
exit "$status"
