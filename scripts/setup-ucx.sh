#!/usr/bin/env bash
# Installs UCX's libraries and headers, and the libclang that the build of kv-ucx needs, under target/ucx.
#
#   scripts/setup-ucx.sh              installs what is missing; does nothing the second time
#   source target/ucx/env.sh          sets the variables that a build needs. After that, for example:
#                                     cargo run --release --features ucx --example pd -- --transport ucx
#   eval "$(scripts/setup-ucx.sh --print)"     installs, and sets the variables
#
# Nothing outside target/ is changed. Needs g++ for its headers, and python3 with pip to download two packages
# (libucx-cu12, 43 MB; libclang, 25 MB). To use UCX of the host instead, set KV_UCX_LIB to the path of libucp.so.0,
# KV_UCX_INCLUDE to the directory that holds ucp/api/ucp.h, and LIBCLANG_PATH to the directory of libclang. CUDA is
# not needed.
set -euo pipefail
cd "$(dirname "$0")/.."

ucx_version=1.22.0
root=$PWD/target/ucx
wheel=$root/libucx_cu12-$ucx_version
. scripts/lib/setup.sh

[ "$(uname -s)" = Linux ] || die "UCX runs only on Linux."
command -v g++ >/dev/null || die "g++ is missing; bindgen needs the headers of a compiler. Install it: apt-get install g++"

own() { [ -n "$1" ] && [ "${1#"$root"}" = "$1" ]; }
library=${KV_UCX_LIB:-} include=${KV_UCX_INCLUDE:-}
if ! own "$library" || ! own "$include"; then
    [ -d "$wheel" ] || download libucx-cu12 "$ucx_version" "$wheel"
fi
own "$library" || library=$wheel/libucx/lib/libucp.so.0
own "$include" || include=$wheel/libucx/include
step "UCX: $library, headers in $include"
[ -e "$library" ] || die "the UCX library $library does not exist"
[ -e "$include/ucp/api/ucp.h" ] || die "there is no ucp/api/ucp.h in $include"

get_clang
write_env <<END
export KV_UCX_LIB='$library'
export KV_UCX_INCLUDE='$include'
END
if [ "${1:-}" = --print ]; then
    cat "$root/env.sh"
else
    step "ready. Before building with --features ucx, in each shell: source target/ucx/env.sh"
fi
