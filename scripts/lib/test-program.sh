#!/usr/bin/env bash
# Runs a program of tests as cargo does, in the folder of its package. What the program prints comes whole to the output, and
# into a file: programs run side by side.
#
#   scripts/lib/test-program.sh FILE [FILTER...] FOLDER PROGRAM
set -euo pipefail
file=$1 folder=${*: -2:1} program=${*: -1}
filters=("${@:2:$#-3}")
said=$(mktemp)
trap 'rm -f "$said"' EXIT
status=0
cd "$folder"
printf '     Running %s, in %s\n' "$(basename "$program")" "$folder" >"$said"
CARGO_MANIFEST_DIR=$folder "$program" "${filters[@]}" >>"$said" 2>&1 || status=$?
[ "$status" -eq 0 ] || printf 'error: %s has ended with status %s\n' "$(basename "$program")" "$status" >>"$said"
{
    flock 9
    tee -a "$file" <"$said"
} 9>>"$file"
exit "$status"
