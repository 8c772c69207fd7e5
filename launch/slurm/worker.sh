#!/usr/bin/env bash
# A Ray worker that waits for the head: Slurm starts both at the same time.
#
#   worker.sh HOST:PORT SECONDS
set -euo pipefail

(($# == 2)) || {
  printf 'usage: worker.sh HOST:PORT SECONDS\n' >&2
  exit 2
}
address=$1
deadline=$((SECONDS + $2))
until (exec 3<>"/dev/tcp/${address%:*}/${address##*:}") 2>/dev/null; do
  if ((SECONDS >= deadline)); then
    printf 'launch: the Ray head at %s did not answer within %s s\n' "$address" "$2" >&2
    exit 1
  fi
  sleep 1
done
exec ray start --address="$address" --disable-usage-stats --block
