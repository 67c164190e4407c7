#!/usr/bin/env bash
# Kills, stops and cuts off workers that call each other, and checks every answer. docs/development/failure_model.md
# says how.
#
#   sudo tools/soak.sh                             a minute of workers on virtual hosts; then one of servers in shutdown
#   sudo tools/soak.sh --minutes 30 --seed 7       without a seed, a new one, which is printed
#   tools/soak.sh --training --minutes 10          trainers of one model; needs no root
#   sudo tools/soak.sh --training --cuts           trainers on virtual hosts, which are cut off at times
#   sudo tools/soak.sh --resuming --minutes 10     cuts, resets and dying proxies at default limits: no call is lost
#
# The report is build/soak/report.md, or build/soak/resuming/report.md.
. "$(dirname "$0")/environment.sh"

programs=(soak soak.serving)
arguments=()
for argument in "$@"; do
  if [ "$argument" = --training ]; then
    programs=(soak.training)
  elif [ "$argument" = --resuming ]; then
    programs=(soak.resuming)
  else
    arguments+=("$argument")
  fi
done

built test
status=0
for program in "${programs[@]}"; do
  report=()
  [ "$program" != soak ] || report=(--report build/soak)
  [ "$program" != soak.resuming ] || report=(--report build/soak/resuming)
  python -m "tests.$program" "${arguments[@]}" "${report[@]}" || status=1
done
exit "$status"
