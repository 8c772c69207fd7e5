#!/usr/bin/env bash
# Runs a command with the secrets of a file in its environment: they pass through no command line, log or job record.
#
#   with-secrets.sh FILE COMMAND [ARGUMENT...]
#
# FILE has a NAME=value per line, the value as it is, without quotes; empty lines and lines that begin with # are
# skipped. Nobody but its owner may read it.
set -euo pipefail
set +x # a caller's tracing would print the values

die() {
  printf 'gymloop: %s\n' "$*" >&2
  exit 2
}

(($# >= 2)) || die "usage: with-secrets.sh FILE COMMAND [ARGUMENT...]"
file=$1
shift
[[ -r $file ]] || die "the file of secrets $file cannot be read"
mode=$(stat -L -c %a -- "$file")
[[ $mode == *00 ]] || die "others can read the file of secrets $file (mode $mode); expected 600: chmod 600 it"

number=0
while IFS= read -r line || [[ -n $line ]]; do
  number=$((number + 1))
  [[ -z $line || $line == \#* ]] && continue
  name=${line%%=*}
  if [[ $line != *=* || ! $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]]; then
    die "$file line $number is not NAME=value" # the line is not shown: it may be the secret
  fi
  export "$name=${line#*=}"
done <"$file"

exec "$@"
