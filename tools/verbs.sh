#!/usr/bin/env bash
# Runs the project over verbs, between two emulated machines with Soft-RoCE: calls, kills, cuts. Needs root, Debian, and
# its packages mmdebstrap, qemu-system-x86 and e2fsprogs.
#
#   sudo tools/verbs.sh                     all trials
#   sudo tools/verbs.sh calls killed
#   tools/verbs.sh --list
#
# The first run makes the machines' disk. The report, the workers' output and the consoles are in build/verbs.
. "$(dirname "$0")/environment.sh"

case " $* " in
  *" --list "*) ;;
  *) environment ;;
esac
# Run with nice: two emulated processors keep two cores busy.
exec nice -n 10 python -m tests.verbs --folder build/verbs "$@"
