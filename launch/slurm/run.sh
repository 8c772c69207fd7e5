#!/usr/bin/env bash
# Runs a command that SIGUSR1 asks to end, as SIGTERM does: srun passes that signal on, and kills at a SIGTERM.
#
#   run.sh COMMAND [ARGUMENT...]
#
# Slurm gives a signal to all processes of a step. The command and what it starts ignore SIGUSR1; a SIGTERM they have
# themselves. However they come, the command is asked once: a run takes a second SIGTERM for a wish to end without saving.
set -euo pipefail

(($# >= 1)) || {
  printf 'usage: run.sh COMMAND [ARGUMENT...]\n' >&2
  exit 2
}
trap '' USR1
"$@" &
run=$!
asked=0
# shellcheck disable=SC2329 # a trap calls it
ask() {
  ((asked)) || kill -TERM "$run" 2>/dev/null || true
  asked=1
}
# A second later: of two signals that came together bash takes the smaller number first, which is not SIGTERM's.
trap '(sleep 1; kill -USR2 "$$" 2>/dev/null || true) &' USR1
trap ask USR2
trap 'asked=1' TERM
while kill -0 "$run" 2>/dev/null; do
  wait "$run" || true # a signal interrupts it, with a status of its own
done
wait "$run" && status=0 || status=$? # the status of the command itself, which bash remembers
exit "$status"
