#!/usr/bin/env bash
# Runs the README's commands on a bare Debian or Ubuntu, which it makes for this and removes afterwards.
#
#   tools/fresh.sh [command ...]     instead of the README's own, for example: tools/fresh.sh 'make build'
#
#   FRESH=build/fresh                folder for the machine, some 8 GB, and for the log
#   FRESH_RELEASE=bookworm           another release than this machine's, from the same mirror: another Python and compiler
#   FRESH_USER=newcomer              the user who runs the commands; in a container that is often root
#   KEEP=                            if set, the machine stays for inspection; the next run removes it
#
# TORCH, UCX and the like reach the commands from the environment, as they do without a fresh machine.
#
# The README names the packages, and its section "The two commands" has the commands. The checkout is cloned, so
# uncommitted changes are missing. apt and pip use the same sources as on this machine: pip's files and PIP_ variables
# are passed on, with the folders and files that they name.
#
# Needs root, mmdebstrap, and package lists (apt-get update).
set -euo pipefail
case ${1:-} in
  -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

FRESH=$(realpath --canonicalize-missing "${FRESH:-build/fresh}")
FRESH_USER=${FRESH_USER:-newcomer}
root=$FRESH/root
log=$FRESH/log

give_up() {
  echo "fresh: $1" >&2
  exit 1
}

[ "$(id -u)" = 0 ] || give_up "only root can make a machine: sudo tools/fresh.sh"
command -v mmdebstrap > /dev/null || give_up "mmdebstrap is missing: apt install mmdebstrap"

packages=$(sed -n 's/.*`apt-get install \([^`]*\)`.*/\1/p' README.md)
[ -n "$packages" ] || give_up "README.md does not say what to install"
if [ $# -gt 0 ]; then
  commands=("$@")
else
  mapfile -t commands < <(sed -n '/^## The two commands$/,/^## Figures$/s/^\(make [a-z-]*\) .*/\1/p' README.md)
  [ ${#commands[@]} = 2 ] || give_up "README.md has ${#commands[@]} commands in its section of two"
fi

. /etc/os-release
# The sources in one format, whichever format apt's files have, and without third-party packages.
sources=$(apt-get indextargets --format 'deb $(SITE) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' "Origin: ${ID^}")
release=${FRESH_RELEASE:-$VERSION_CODENAME}
if [ "$release" != "$VERSION_CODENAME" ]; then
  sources=$(sed -n "s/ $VERSION_CODENAME / $release /p" <<< "$sources") # its updates may be elsewhere or missing
fi
[ -n "$sources" ] || give_up "apt has no lists of ${ID^}'s packages: apt-get update"

rm -rf --one-file-system "$root"
mkdir -p "$FRESH"
trap '[ -n "${KEEP:-}" ] || rm -rf --one-file-system "$root"' EXIT

SECONDS=0
say() { echo "fresh: [$SECONDS s] $*"; }

# Pass on proxies and similar options.
apt_options=()
while IFS= read -r option; do
  apt_options+=("--aptopt=$option")
done < <(apt-config dump --format '%f "%v";%n' Acquire | grep -E '^Acquire::(https?::|Check-)[A-Za-z:-]* ".+"' || true)

mmdebstrap --quiet --mode=root --variant=minbase "${apt_options[@]}" \
  --aptopt='Apt::Install-Recommends "false"' --dpkgopt='path-exclude=/usr/share/doc/*' \
  --include="ca-certificates,${packages// /,}" "$release" "$root" - <<< "$sources" > "$log" 2>&1 ||
  { tail -20 "$log" >&2; give_up "there is no machine. Old package lists name files that are gone: apt-get update"; }
[ "$FRESH_USER" = root ] || chroot "$root" useradd --create-home --shell /bin/bash "$FRESH_USER"
home=$(chroot "$root" sh -c "echo ~$FRESH_USER")
say "a bare $(. "$root/etc/os-release" && echo "$PRETTY_NAME")"

git clone --quiet "file://$PWD" "$root$home/torch_ucx_rpc"

# pip's configuration. Its paths are mounted at the same places. An index in a folder, file:///.../simple, has its files
# beside it.
declare -A shown=()
show_paths_of() {
  while IFS= read -r path; do
    shown[${path%/simple}]=1
  done < <(grep -o '/[^ ,"]*' <<< "$1" | sed 's,^//*,/,; s,/*$,,')
}
for file in /etc/pip.conf "$HOME/.config/pip/pip.conf" "$HOME/.pip/pip.conf"; do
  [ -f "$file" ] || continue
  install -D -m 644 "$file" "$root${file/#$HOME/$home}"
  show_paths_of "$(< "$file")"
done
variables=()
while IFS= read -r variable; do
  variables+=("$variable")
  show_paths_of "${variable#*=}"
done < <(env | grep -iE '^(PIP_[A-Z_]*|https?_proxy|no_proxy|TORCH|UCX)=' || true)
binds=()
for path in "${!shown[@]}"; do
  # Parts of a web address look like paths, too.
  case $path in '' | / | /proc* | /dev* | /sys*) continue ;; esac
  if [ -d "$path" ]; then
    mkdir -p "$root$path"
  elif [ -f "$path" ]; then
    mkdir -p "$root$(dirname "$path")"
    touch "$root$path"
  else
    continue
  fi
  binds+=("$path")
done
chroot "$root" chown -R "$FRESH_USER:" "$home"
cp --dereference /etc/resolv.conf /etc/hosts "$root/etc/"

in_fresh_machine() {
  # The mounts and processes of the command end with it.
  unshare --mount --pid --fork --kill-child bash -euc '
    root=$1 user=$2 home=$3 binds=$4
    shift 4
    mount -t proc proc "$root/proc"
    mount -t sysfs -o ro sys "$root/sys"
    mount --bind /dev "$root/dev"
    mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
    while IFS= read -r path; do
      [ -z "$path" ] || { mount --bind "$path" "$root$path"; mount -o remount,bind,ro "$root$path"; }
    done <<< "$binds"
    exec chroot --userspec="$user" "$root" env -i HOME="$home" USER="$user" LANG=C.UTF-8 \
      PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"
  ' - "$root" "$FRESH_USER" "$home" "$(printf '%s\n' "${binds[@]}")" "${variables[@]}" \
    bash -c 'cd ~/torch_ucx_rpc && eval "$0"' "$1"
}

status=0
for command in "${commands[@]}"; do
  begin=$SECONDS
  if in_fresh_machine "$command" 2>&1 | tee -a "$log"; then
    say "\`$command\` took $((SECONDS - begin)) s"
  else
    status=1
    say "\`$command\` FAILED after $((SECONDS - begin)) s"
  fi
done
exit "$status"
