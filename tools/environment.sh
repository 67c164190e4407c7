# Sourced by the scripts of this folder, except fresh.sh. They run in the repository's root, with the tools of VENV
# first on PATH.
#
#   VENV=.venv     the environment, which `make build` makes
#
# A script's --help prints the comment at its beginning.
set -euo pipefail

case " $* " in
  *' --help '* | *' -h '*)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export VENV=${VENV:-.venv}
PATH=$(realpath "$VENV")/bin:$PATH
export PATH

give_up() {
  echo "${0##*/}: $1" >&2
  exit 2
}

# Makes the environment. The arguments are extras of setup.cfg to install.
environment() {
  local targets=()
  for extra in "$@"; do
    targets+=("$VENV/.extra-$extra")
  done
  make --no-print-directory environment "${targets[@]}"
}

# Does the same, and compiles the package.
built() {
  make --no-print-directory build
  environment "$@"
}
