#!/usr/bin/env bash
# Runs PyTorch's own RPC suites once or several times, stores the outcome, and writes docs/conformance.md.
#
#   tools/conformance.sh                           once, on UCX
#   tools/conformance.sh --runs 3
#   tools/conformance.sh --backend TENSORPIPE      on PyTorch's backend
#   tools/conformance.sh --cuda                    the suites that need GPUs; fails without a GPU
#   UCX_TLS=tcp,self tools/conformance.sh          another configuration is another row of the page
#
# `make test-conformance` runs the suites once and stores nothing.
. "$(dirname "$0")/environment.sh"

runs=1 backend=UCX suites=(tests/conformance)
while [ $# != 0 ]; do
  case $1 in
    --runs) runs=$2 && shift ;;
    --backend) backend=$2 && shift ;;
    --cuda) suites=(tests/conformance/test_cuda_suites.py --cuda) ;;
    *) give_up "unknown argument $1; --help lists them" ;;
  esac
  shift
done

built test
reports=$(mktemp -d)
trap 'rm -r "$reports"' EXIT
status=0
for run in $(seq "$runs"); do
  python -m pytest "${suites[@]}" --rpc-backend "$backend" --conformance-report "$reports/$run.json" || status=$?
done
if [ -e "$reports/1.json" ]; then
  python -m tests.conformance.page record "$reports"/*.json
fi
exit "$status"
