#!/usr/bin/env bash
# Submits a training run to a Ray cluster that runs already, follows its output, and ends as it ends.
#
#   RAY_API_SERVER_ADDRESS=http://head:8265 launch/ray-job/submit.sh recipes/my.yaml cluster.num_nodes=2
#   DRY_RUN=1 ... prints the command and runs none
#
# Arguments are those of `gymloop train`; paths are those of the cluster's machines, on a file system that they share.
#   GYMLOOP_HOME        folder of this repository on the cluster [the present folder]
#   GYMLOOP_VENV        folder of the Python environment there [GYMLOOP_HOME/.venv]
#   GYMLOOP_SECRETS     file of NAME=value lines there, mode 600: a job's environment can be read by all of the cluster's
#                       users, so secrets do not go into it (see launch/with-secrets.sh)
#   GYMLOOP_JOB         the job's id, by which `ray job stop` ends it [gymloop-DATE-TIME]
set -euo pipefail

die() {
  printf 'launch: %s\n' "$*" >&2
  exit 2
}

(($# >= 1)) || die "usage: submit.sh RECIPE [argument of gymloop train...]"
[[ -n ${RAY_API_SERVER_ADDRESS:-} ]] || die "RAY_API_SERVER_ADDRESS is not set; expected the cluster's dashboard, such as http://head:8265"
home=${GYMLOOP_HOME:-$PWD}
venv=${GYMLOOP_VENV:-$home/.venv}
id=${GYMLOOP_JOB:-gymloop-$(date +%Y%m%d-%H%M%S)}

named=0
for argument in "$@"; do
  [[ $argument == --run || $argument == --run=* ]] && named=1
done
entrypoint=("$venv/bin/gymloop" train "$@")
((named)) || entrypoint+=(--run "$id")
[[ -n ${GYMLOOP_SECRETS:-} ]] && entrypoint=("$home/launch/with-secrets.sh" "$GYMLOOP_SECRETS" "${entrypoint[@]}")
# The job begins in a folder of Ray's; recipes and results are relative to the repository.
# shellcheck disable=SC2016  # the inner shell expands them
entrypoint=(bash -c 'cd -- "$0" && exec "$@"' "$home" "${entrypoint[@]}")
submit=(ray job submit --submission-id "$id" -- "${entrypoint[@]}")

if [[ ${DRY_RUN:-0} == 1 ]]; then
  printf '%q ' "${submit[@]}"
  printf '\n'
  exit 0
fi
exec "${submit[@]}"
