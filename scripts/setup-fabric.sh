#!/usr/bin/env bash
# Finds libfabric with its headers, or unpacks Debian's packages of it under target/fabric; and the libclang that the
# build of kv-fabric needs.
#
#   scripts/setup-fabric.sh           unpacks what is missing; does nothing the second time
#   source target/fabric/env.sh       sets the variables that a build and a run need. After that, for example:
#                                     cargo run --release --features fabric --example pd -- --transport fabric
#   eval "$(scripts/setup-fabric.sh --print)"    unpacks, and sets the variables
#
# Nothing outside target/ is changed, and no root is needed. An installed libfabric (apt-get install libfabric-dev, or
# EFA's in /opt/amazon/efa) is taken if there is one. To use another one, set KV_FABRIC_LIB to the path of
# libfabric.so.1, KV_FABRIC_INCLUDE to the directory above rdma/fabric.h, and LIBCLANG_PATH to the directory of libclang.
set -euo pipefail
cd "$(dirname "$0")/.."

root=$PWD/target/fabric
. scripts/lib/setup.sh
# libfabric, and what its Debian build links.
packages=(libfabric1 libfabric-dev libibverbs1 ibverbs-providers librdmacm1 libnl-3-200 libnl-route-3-200
    libpsm2-2 libpsm-infinipath1 libnuma1 libatomic1 libuuid1)

[ "$(uname -s)" = Linux ] || die "kv-fabric runs only on Linux."
command -v g++ >/dev/null || die "g++ is missing; its headers are read by bindgen. Install it: apt-get install g++"

# installed: sets library and include to an installed libfabric that has headers, if there is one.
installed() {
    local place
    for place in "/opt/amazon/efa/lib*/libfabric.so.1:/opt/amazon/efa/include" "/usr/local/lib/libfabric.so.1:/usr/local/include" \
        "/usr/lib/*-linux-gnu/libfabric.so.1:/usr/include" "/usr/lib64/libfabric.so.1:/usr/include"; do
        library=$(compgen -G "${place%%:*}" | head -n 1 || true)
        include=${place#*:}
        [ -n "$library" ] && [ -e "$include/rdma/fabric.h" ] && return 0
    done
    return 1
}

# unpack: Debian's packages, each library in one directory, where the loader of kv-fabric looks for what is missing.
unpack() {
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
        die "libfabric is not installed, and this host has no apt-get and dpkg-deb to unpack it. Install it with its headers, or set KV_FABRIC_LIB and KV_FABRIC_INCLUDE"
    mkdir -p "$root"
    local parts
    parts=$(mktemp -d "$root/.download.XXXXXX")
    step "downloading ${packages[*]}"
    if ! (cd "$parts" && apt-get -q -o APT::Sandbox::User=root download "${packages[@]}" >&2); then
        rm -rf "$parts"
        die "libfabric is not installed, and could not be downloaded; see apt-get's message above. With root: apt-get update && apt-get install libfabric-dev"
    fi
    mkdir -p "$parts/unpacked/lib"
    local package
    for package in "$parts"/*.deb; do
        dpkg-deb -x "$package" "$parts/unpacked"
    done
    find "$parts/unpacked/lib/" "$parts/unpacked/usr/lib" -name '*.so*' -type f | while read -r file; do
        # The name by which others ask for the library: up to the first number of its version.
        cp "$file" "$parts/unpacked/$(basename "$file" | sed -E 's/(\.so\.[0-9]+).*/\1/')"
    done
    rm -rf "$root/libfabric"
    mkdir "$parts/libfabric"
    mv "$parts/unpacked"/*.so* "$parts/libfabric/"
    mv "$parts/unpacked/usr/include" "$parts/libfabric/include"
    mv "$parts/libfabric" "$root/libfabric"
    rm -rf "$parts"
}

if [ -n "${KV_FABRIC_LIB:-}" ] && [ "${KV_FABRIC_LIB#"$root"}" = "$KV_FABRIC_LIB" ]; then
    library=$KV_FABRIC_LIB
    include=${KV_FABRIC_INCLUDE:-/usr/include}
    step "libfabric: $library (from KV_FABRIC_LIB), headers in $include"
elif installed; then
    step "libfabric: $library (installed), headers in $include"
else
    [ -d "$root/libfabric" ] || unpack
    library=$root/libfabric/libfabric.so.1
    include=$root/libfabric/include
    step "libfabric: $library"
fi
[ -e "$library" ] || die "the library $library does not exist"
[ -e "$include/rdma/fabric.h" ] || die "the header $include/rdma/fabric.h does not exist; set KV_FABRIC_INCLUDE"
missing=$(LD_LIBRARY_PATH=$(dirname "$library")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} ldd "$library" | sed -n 's/^\s*\(\S*\) => not found.*/\1/p' | tr '\n' ' ')
[ -z "$missing" ] || die "libfabric needs libraries that are missing: $missing"

get_clang
write_env <<END
export KV_FABRIC_LIB='$library'
export KV_FABRIC_INCLUDE='$include'
END
if [ "${1:-}" = --print ]; then
    cat "$root/env.sh"
else
    step "ready. Before building with --features fabric, in each shell: source target/fabric/env.sh"
fi
