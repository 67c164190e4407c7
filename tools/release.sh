#!/usr/bin/env bash
# Makes the files of a release in dist/. docs/development/maintaining.md says how they are used.
#
#   tools/release.sh wheel                                           one wheel, for the environment's Python and torch
#   tools/release.sh wheels                                          for all Pythons and torchs of this machine
#   tools/release.sh wheels --torch 2.13 2.14.0 --python 3.13        for these
#   tools/release.sh sdist                                           the source distribution
#   tools/release.sh index                                           dist/index, a package index of the files in dist/
#   tools/release.sh index --packages-url https://example.org/v1     the same, where the files are served elsewhere
. "$(dirname "$0")/environment.sh"

# The tools have their own environment.
tools=build/release-tools
release_tools() {
  if [ ! -e "$tools/.done" ] || [ setup.cfg -nt "$tools/.done" ]; then
    "${PYTHON:-python3}" -m venv "$tools"
    "$tools/bin/python" tools/build_environment.py requirements release |
      xargs "$tools/bin/pip" --disable-pip-version-check --quiet install
    touch "$tools/.done"
  fi
}

what=${1:-nothing}
[ $# = 0 ] || shift
case $what in
  wheel)
    environment
    rm -rf build/lib.*
    TORCH_UCX_RPC_PIN=1 pip --quiet wheel --no-build-isolation --no-deps --wheel-dir dist .
    ;;
  wheels)
    release_tools
    "$tools/bin/python" tools/wheels.py "$@"
    ;;
  sdist)
    release_tools
    "$tools/bin/python" -m build --sdist --outdir dist .
    ;;
  index) "${PYTHON:-python3}" tools/index.py "$@" ;;
  *) give_up "say what to make: wheel, wheels, sdist or index; got $what" ;;
esac
