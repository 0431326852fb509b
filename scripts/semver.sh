#!/usr/bin/env bash
# Compares the public interface of each library crate with that of an earlier commit.
#
#   scripts/semver.sh            the working tree with HEAD; with HEAD~1 where nothing has changed since HEAD
#   scripts/semver.sh v0.1.0     the working tree with this commit, tag or branch
#
# Prints what was added (+), removed (-) and changed (!), crate by crate. Ends with 1 if something that is stable was
# removed or changed and the crate's version does not say so: below 1.0 the minor version must be higher, from 1.0 on
# the major version. What the facade re-exports in `kv_transfer::unstable` is printed with a ~ and never counts; so is
# what it does not re-export, in the crates below it.
#
# The interfaces are read out of rustdoc's JSON: functions and methods by their types, enums and structs by their
# variants and public fields, traits by what must be implemented, and which traits a type implements. What rustdoc does
# not tell is not compared: behaviour, and the smallest Rust version that compiles the crate.
#
# Needs python3 and git. JSON is an unstable output of rustdoc, so the toolchain is told to allow it (RUSTC_BOOTSTRAP);
# no nightly toolchain is needed. Transports whose build lacks something that scripts/setup-{nixl,ucx,fabric}.sh cannot
# install are left out, and a line says so.
set -euo pipefail
cd "$(dirname "$0")/.."

die() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}
command -v python3 >/dev/null || die "python3 is missing; it compares the interfaces. Install it: apt-get install python3"
command -v cargo >/dev/null || die "cargo is missing. Install Rust: https://rustup.rs"
git rev-parse --git-dir >/dev/null 2>&1 || die "this is no git repository, so there is no earlier commit to compare with"

earlier=${1:-HEAD}
[ $# -gt 0 ] || [ -n "$(git status --porcelain --untracked-files=normal)" ] || earlier=HEAD~1
commit=$(git rev-parse --verify --quiet "$earlier^{commit}") || die "there is no commit $earlier"

crates=(kv-core kv-host kv-conformance kv-poll kv-local kv-tcp kv-bootstrap kv-ways kv-ec kv-interop kv-observe kv-timeline kv-candle
    kv-transfer)
for library in nixl ucx fabric; do
    if settings=$("scripts/setup-$library.sh" --print); then
        eval "$settings"
        crates+=("kv-$library")
    else
        echo "NOT COMPARED: kv-$library, for the reason that scripts/setup-$library.sh gives above"
    fi
done

work=$PWD/target/semver
mkdir -p "$work"
tree=$work/tree
git worktree remove --force "$tree" 2>/dev/null || rm -rf "$tree"
git worktree prune
git worktree add --quiet --detach "$tree" "$commit"
trap 'git worktree remove --force "$tree"' EXIT

# interface <root of a checkout> <folder for the JSON>
interface() {
    local packages=() crate
    rm -rf "$2" "$work/build/doc"
    mkdir -p "$2"
    cargo metadata --manifest-path "$1/Cargo.toml" --no-deps --format-version 1 >"$2/metadata"
    for crate in "${crates[@]}"; do
        if grep -q "\"name\":\"$crate\"" "$2/metadata"; then packages+=(--package "$crate"); fi
    done
    RUSTC_BOOTSTRAP=1 RUSTDOCFLAGS="-Z unstable-options --output-format json --cap-lints allow" \
        cargo doc --quiet --manifest-path "$1/Cargo.toml" --target-dir "$work/build" --lib --no-deps "${packages[@]}" ||
        die "rustdoc has failed on $1; see its message above"
    cp "$work"/build/doc/*.json "$2/"
}
interface "$tree" "$work/before"
interface "$PWD" "$work/now"
echo "compared with $(git log -1 --format='%h %s' "$commit")"
python3 scripts/semver.py "$work/before" "$work/now" "${crates[@]}"
