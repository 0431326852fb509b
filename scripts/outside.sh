#!/usr/bin/env bash
# Builds and runs the program of README's "Use it" in a crate outside of the workspace, over kv-local and over NIXL.
#
#   scripts/outside.sh
#
# The crate is copied to target/outside, with the versions that Cargo.lock pins. Where NIXL cannot be set up, its
# program is left out, and said so.
set -euo pipefail
cd "$(dirname "$0")/.."

root=$PWD
outside=$root/target/outside
mkdir -p "$outside"
cp -r tests/outside/. "$outside"
cp Cargo.lock "$outside/Cargo.lock"
sed -i "s|path = \"../..\"|path = \"$root\"|" "$outside/Cargo.toml"
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target}

run() {
    printf '== %s\n' "$*" >&2
    local said
    (cd "$outside" && cargo build --quiet "$@")
    said=$(cd "$outside" && timeout 120 cargo run --quiet "$@")
    printf '%s\n' "$said"
    [ "$said" = "Success, the bytes are right: true" ]
}

run --bin local
if settings=$(scripts/setup-nixl.sh --print); then
    eval "$settings"
    run --features nixl --bin nixl
else
    echo "NOT TESTED: the program over NIXL, for the reason above"
fi
