#!/usr/bin/env bash
# Puts bugs into a copy of the sources, one by one (tests/mutants). The tests that a bug names must fail.
#
#   tools/mutants.sh                         all: hours
#   tools/mutants.sh NAME ...
#   tools/mutants.sh --python | --cpp        bugs in Python, which need no build; bugs in C++
#   tools/mutants.sh --list
. "$(dirname "$0")/environment.sh"

case " $* " in
  *" --list "*) ;;
  *) built test ;;
esac
exec python -m tests.mutants "$@"
