# What the setup scripts share: messages, wheels, and the libclang that bindgen needs. Sourced from the root of the
# repository, with `root` set to the directory under target/ that the script fills.

clang_version=18.1.1

step() { printf '== %s\n' "$*" >&2; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

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

# find_clang: prints the directory of the host's libclang, or of one that another setup script has downloaded.
find_clang() {
    local dir
    for dir in "${LIBCLANG_PATH:-}" "$(llvm-config --libdir 2>/dev/null || true)" /usr/lib/llvm-*/lib /usr/lib64 /usr/lib/*-linux-gnu \
        "$PWD"/target/*/libclang-$clang_version/libclang-$clang_version.data/platlib/clang/native; do
        if [ -n "$dir" ] && compgen -G "$dir/libclang.so*" >/dev/null || { [ -n "$dir" ] && compgen -G "$dir/libclang-[0-9]*.so*" >/dev/null; }; then
            printf '%s\n' "$dir"
            return
        fi
    done
}

# get_clang: sets `clang` to the directory of a libclang, which is downloaded if there is none.
get_clang() {
    clang=$(find_clang)
    if [ -z "$clang" ]; then
        download libclang "$clang_version" "$root/libclang-$clang_version"
        clang=$root/libclang-$clang_version/libclang-$clang_version.data/platlib/clang/native
        [ -e "$clang/libclang.so" ] || die "the libclang package has no $clang/libclang.so; install libclang yourself (apt-get install libclang-dev) and set LIBCLANG_PATH"
    fi
    step "libclang: $clang"
}

# write_env: writes env.sh, of the lines on standard input and the lines for bindgen.
write_env() {
    mkdir -p "$root"
    # A libclang without clang lacks the headers of the compiler; g++ has the same headers.
    {
        cat
        printf "export LIBCLANG_PATH='%s'\n" "$clang"
        printf "export BINDGEN_EXTRA_CLANG_ARGS='-isystem %s'\n" "$(g++ -print-file-name=include)"
    } >"$root/env.sh.new"
    mv "$root/env.sh.new" "$root/env.sh"
}
