#!/usr/bin/env bash
# Runs all benchmarks, on a machine that does nothing else. Writes benchmarks/results, and the tables and plots of the
# docs. It takes half an hour.
#
#   tools/record_benchmarks.sh
#
# Missed bounds are recorded too. The script fails if a bound was missed or a contender failed.
. "$(dirname "$0")/environment.sh"

# The other libraries have their own environment: UCXX needs an older UCX, and Monarch needs a torch. A library that
# cannot be installed is left out.
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
