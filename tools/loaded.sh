#!/usr/bin/env bash
# Runs a target of make several times beside two busy processes. A test that fails only then relies on a fast machine.
#
#   tools/loaded.sh                                `make test`, ten times
#   tools/loaded.sh --times 3 test-libraries       another target
#
# The output of each run is in build/loaded. At the end it lists the tests that have failed, and how often.
. "$(dirname "$0")/environment.sh"

times=10
if [ "${1:-}" = --times ]; then
  times=$2
  shift 2
fi
verb=${1:-test}

mkdir -p build/loaded
rm -f build/loaded/*.log
make --no-print-directory build
for _ in 1 2; do
  (while :; do :; done) &
  busy+=($!)
done
trap 'kill "${busy[@]}"' EXIT

failed=0
for run in $(seq "$times"); do
  if make --no-print-directory "$verb" > "build/loaded/$run.log" 2>&1; then
    echo "run $run of $times: passed"
  else
    echo "run $run of $times: FAILED"
    failed=$((failed + 1))
  fi
done
echo "$failed of $times runs failed"
# The lines of pytest and ctest that name a failed test.
grep -hoE '^(FAILED|ERROR) [^ ]+|[^ ]+ \(Failed\)|[^ ]+ \(Timeout\)' build/loaded/*.log | sort | uniq -c | sort -rn || true
[ "$failed" -eq 0 ]
