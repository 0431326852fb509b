#!/usr/bin/env bash
# Installs NIXL's libraries, and the libclang that the build of nixl-sys needs, under target/nixl.
#
#   scripts/setup-nixl.sh             installs what is missing; does nothing the second time
#   source target/nixl/env.sh         sets the variables that a build needs. After that, for example:
#                                     cargo run --release --features nixl --example pd -- --transport nixl
#   eval "$(scripts/setup-nixl.sh --print)"    installs, and sets the variables
#
# Nothing outside target/ is changed. Needs g++, and python3 with pip to download two packages (nixl-cu12, 69 MB;
# libclang, 25 MB). To use libraries of the host instead, set KV_NIXL_LIB to the path of libnixl_capi.so, and
# LIBCLANG_PATH to the directory of libclang. Neither CUDA nor PyTorch is needed.
set -euo pipefail
cd "$(dirname "$0")/.."

nixl_version=1.5.1
clang_version=18.1.1
root=$PWD/target/nixl
wheel=$root/nixl_cu12-$nixl_version

step() { printf '== %s\n' "$*" >&2; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

[ "$(uname -s)" = Linux ] || die "NIXL runs only on Linux."
command -v g++ >/dev/null || die "g++ is missing; nixl-sys compiles one C++ file. Install it: apt-get install g++"

# download <package> <version> <directory>: unpacks a wheel.
download() {
    command -v python3 >/dev/null || die "python3 is missing; it downloads $1. Install it: apt-get install python3 python3-pip"
    python3 -m pip --version >/dev/null 2>&1 ||
        die "python3 has no pip; it downloads $1. Install it: apt-get install python3-pip"
    step "downloading $1 $2"
    mkdir -p "$root"
    local parts
    parts=$(mktemp -d "$root/.download.XXXXXX")
    # The package is unpacked under another name and renamed at the end, so that an existing directory is complete.
    # pip prints its progress to standard output, which is kept for --print.
    if ! python3 -m pip download --no-deps --only-binary=:all: --python-version 3.11 --dest "$parts" "$1==$2" >&2; then
        rm -rf "$parts"
        die "$1 $2 could not be downloaded; see pip's message above. Is a package index reachable, and is there a wheel for $(python3 -V) on $(uname -m)?"
    fi
    step "unpacking $1 $2"
    python3 -m zipfile -e "$parts"/*.whl "$parts/unpacked"
    rm -rf "$3"
    mv "$parts/unpacked" "$3"
    rm -rf "$parts"
}

if [ -n "${KV_NIXL_LIB:-}" ] && [ "${KV_NIXL_LIB#"$root"}" = "$KV_NIXL_LIB" ]; then
    library=$KV_NIXL_LIB
    step "NIXL: $library (from KV_NIXL_LIB)"
else
    [ -d "$wheel" ] || download nixl-cu12 "$nixl_version" "$wheel"
    library=$wheel/.nixl_cu12.mesonpy.libs/libnixl_capi.so
    step "NIXL $nixl_version: $library"
fi
[ -e "$library" ] || die "the NIXL library $library does not exist"

find_clang() {
    local dir
    for dir in "${LIBCLANG_PATH:-}" "$(llvm-config --libdir 2>/dev/null || true)" /usr/lib/llvm-*/lib /usr/lib64 /usr/lib/*-linux-gnu; do
        if [ -n "$dir" ] && compgen -G "$dir/libclang.so*" >/dev/null || { [ -n "$dir" ] && compgen -G "$dir/libclang-[0-9]*.so*" >/dev/null; }; then
            printf '%s\n' "$dir"
            return
        fi
    done
}
clang=$(find_clang)
if [ -z "$clang" ]; then
    [ -d "$root/libclang-$clang_version" ] || download libclang "$clang_version" "$root/libclang-$clang_version"
    clang=$root/libclang-$clang_version/libclang-$clang_version.data/platlib/clang/native
    [ -e "$clang/libclang.so" ] || die "the libclang package has no $clang/libclang.so; install libclang yourself (apt-get install libclang-dev) and set LIBCLANG_PATH"
fi
step "libclang: $clang"

# A libclang without clang lacks the headers of the compiler; g++ has the same headers.
mkdir -p "$root"
cat >"$root/env.sh.new" <<EOF
export KV_NIXL_LIB='$library'
export LIBCLANG_PATH='$clang'
export BINDGEN_EXTRA_CLANG_ARGS='-isystem $(g++ -print-file-name=include)'
EOF
mv "$root/env.sh.new" "$root/env.sh"
if [ "${1:-}" = --print ]; then
    cat "$root/env.sh"
else
    step "ready. Before building with --features nixl, in each shell: source target/nixl/env.sh"
fi
