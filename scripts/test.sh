#!/usr/bin/env bash
# Installs what the tests need, and runs all tests.
#
#   scripts/test.sh            everything
#   scripts/test.sh push       only tests whose name contains "push"
#
# Needs: a Rust toolchain (https://rustup.rs), a C compiler and linker (gcc), and 2.5 GB of disk. Cargo fetches
# everything else, in the versions that Cargo.lock pins. kv-local and kv-tcp have no native dependency. For the
# transports over NIXL, UCX and libfabric, scripts/setup-{nixl,ucx,fabric}.sh download these libraries into target/.
# Where that is not possible (no g++, no pip, no apt-get), the tests of the transport are left out, and the last line of
# the output says so. The same holds for the browser that looks at the page of a timeline, which
# scripts/setup-chromium.sh downloads into target/chromium.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n== %s\n' "$*" >&2; }
missing() {
    printf 'error: %s is missing. %s\n' "$1" "$2" >&2
    exit 1
}

step "checking the tools"
command -v cargo >/dev/null || missing cargo "Install Rust: https://rustup.rs"
command -v cc >/dev/null || missing cc "Install a C compiler: apt-get install gcc"
wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
have=$(rustc --version | cut -d' ' -f2)
if [ "$(printf '%s\n%s\n' "$wanted" "$have" | sort -V | head -n 1)" != "$wanted" ]; then
    missing "Rust $wanted or newer (found $have)" "Update it: rustup update stable"
fi
# A linker that runs out of disk space prints "bus error" and nothing else.
target=${CARGO_TARGET_DIR:-target}
free=$(df -Pm "$(dirname "$target")" 2>/dev/null | awk 'NR == 2 { print $4 }') || free=2500
built=$( (du -sm "$target" 2>/dev/null || echo 0) | tail -n 1 | cut -f1)
if [ $((free + built)) -lt 2500 ]; then
    missing "disk space" "The build needs 2.5 GB in $target, and $free MB are free there."
fi
[ "$(uname -s)" = Linux ] || missing Linux "kv-local uses memfd, pidfd and Unix sockets of Linux."

step "setting up the libraries of transports"
. scripts/lib/natives.sh
set_up_natives
# A test that looks for a library that is there must not be skipped.
for library in "${natives[@]}"; do export "KV_${library^^}_REQUIRED=1"; done

step "setting up a browser"
if KV_CHROMIUM=$(scripts/setup-chromium.sh); then
    export KV_CHROMIUM KV_CHROMIUM_REQUIRED=1
else
    unset KV_CHROMIUM
    without+="; the page of a timeline was not looked at in a browser, for the reason that scripts/setup-chromium.sh gave above"
fi

step "fetching the packages of Cargo.lock"
cargo fetch --locked

step "building"
cargo test "${what[@]}" --locked --no-run
# Tests start the example programs.
cargo build "${what[@]}" --profile test --locked --examples

step "running the tests, two programs at once"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Folder and file of each program of tests, in two lines. Tests wait for half of their time, so a second program has room.
programs() {
    cargo test "${what[@]}" --locked --no-run --message-format=json 2>/dev/null |
        sed -n '/"test":true},"features":/s/.*"manifest_path":"\([^"]*\)\/Cargo.toml".*"executable":"\([^"]*\)".*/\1\n\2/p'
}
status=0
programs | xargs -d '\n' -r -P 2 -n 2 scripts/lib/test-program.sh "$log" "$@" || status=$?
cargo test "${what[@]}" --locked --no-fail-fast --doc -- "$@" 2>&1 | tee -a "$log" || status=$?
grep '^error: .* has ended with status' "$log" || true

# One last line with the sums over all test binaries.
sum() { awk -v word="$1" '/^test result:/ { for (i = 1; i < NF; i++) if ($(i + 1) ~ "^" word) n += $i } END { print n + 0 }' "$log"; }
passed=$(sum passed) failed=$(sum failed) skipped=$(sum ignored)
printf '\n%s passed, %s failed, %s skipped%s\n' "$passed" "$failed" "$skipped" "${without:-}"
[ "$status" -eq 0 ] && [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
