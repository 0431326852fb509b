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
root=$PWD/target/nixl
wheel=$root/nixl_cu12-$nixl_version
. scripts/lib/setup.sh

[ "$(uname -s)" = Linux ] || die "NIXL runs only on Linux."
command -v g++ >/dev/null || die "g++ is missing; nixl-sys compiles one C++ file. Install it: apt-get install g++"

if [ -n "${KV_NIXL_LIB:-}" ] && [ "${KV_NIXL_LIB#"$root"}" = "$KV_NIXL_LIB" ]; then
    library=$KV_NIXL_LIB
    step "NIXL: $library (from KV_NIXL_LIB)"
else
    [ -d "$wheel" ] || download nixl-cu12 "$nixl_version" "$wheel"
    library=$wheel/.nixl_cu12.mesonpy.libs/libnixl_capi.so
    step "NIXL $nixl_version: $library"
fi
[ -e "$library" ] || die "the NIXL library $library does not exist"

get_clang
write_env <<END
export KV_NIXL_LIB='$library'
END
if [ "${1:-}" = --print ]; then
    cat "$root/env.sh"
else
    step "ready. Before building with --features nixl, in each shell: source target/nixl/env.sh"
fi
