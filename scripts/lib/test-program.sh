#!/usr/bin/env bash
# Runs a program of tests as cargo does, in the folder of its package. Programs run side by side, so what a program prints
# comes as a whole, to the output and into a file.
#
#   scripts/lib/test-program.sh FILE [FILTER...] FOLDER PROGRAM
set -euo pipefail
file=$(realpath "$1") folder=${*: -2:1} program=${*: -1}
filters=("${@:2:$#-3}")
name=$(basename "$program")
said=$(realpath "$(mktemp)")
tell() {
    { flock 9; tee -a "$file" <"$said"; } 9>>"$file"
    rm -f "$said"
}
# Also what a program has said that is interrupted.
trap tell EXIT
trap 'exit 1' INT TERM
printf '     Started %s\n' "$name" >&2
printf '     Running %s, in %s\n' "$name" "$folder" >"$said"
cd "$folder"
status=0
CARGO_MANIFEST_DIR=$folder "$program" "${filters[@]}" >>"$said" 2>&1 || status=$?
[ "$status" -eq 0 ] || printf 'error: %s has ended with status %s\n' "$name" "$status" >>"$said"
[ "$status" -eq 0 ]
