#!/usr/bin/env bash
# Puts a headless Chromium under target/chromium, for the tests that look at the page of a timeline.
#
#   scripts/setup-chromium.sh           installs what is missing; does nothing the second time. The last line of the
#                                       output is the path of the program
#   export KV_CHROMIUM=$(scripts/setup-chromium.sh)    and then, for example: cargo test -p kv-timeline
#
# Tests find target/chromium by themselves. Nothing outside target/ is changed, and root is not needed: on Debian and
# Ubuntu, `apt-get download` fetches the package chromium-headless-shell and the libraries that the host lacks
# (100 MB), and dpkg-deb unpacks them. Elsewhere, install a Chromium or Chrome yourself, and set KV_CHROMIUM to its
# path.
set -euo pipefail
cd "$(dirname "$0")/.."

package=chromium-headless-shell
root=${CARGO_TARGET_DIR:-target}/chromium
case $root in /*) ;; *) root=$PWD/$root ;; esac

step() { printf '== %s\n' "$*" >&2; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

if [ -n "${KV_CHROMIUM:-}" ]; then
    [ -x "$KV_CHROMIUM" ] || die "KV_CHROMIUM is $KV_CHROMIUM, which is no program"
    echo "$KV_CHROMIUM"
    exit
fi
if [ ! -x "$root/chromium" ]; then
    for tool in apt-get dpkg-deb; do
        command -v "$tool" >/dev/null || die "$tool is missing: install a Chromium yourself, and set KV_CHROMIUM to its path"
    done
    # What apt-get would install, the libraries that are here left out. A simulation needs no root.
    packages=$(apt-get install --simulate --no-install-recommends "$package" 2>/dev/null | awk '$1 == "Inst" { print $2 }') ||
        die "apt-get knows no package $package: is there one for this release, and was 'apt-get update' run?"
    [ -n "$packages" ] || packages=$package
    rm -rf "$root.new"
    mkdir -p "$root.new/debs" "$root.new/root"
    step "downloading" $packages
    # shellcheck disable=SC2086  # A list of names.
    (cd "$root.new/debs" && apt-get download $packages >&2) || die "the packages could not be downloaded; see above"
    step "unpacking"
    for deb in "$root.new"/debs/*.deb; do
        dpkg-deb --extract "$deb" "$root.new/root"
    done
    rm -rf "$root.new/debs"
    found=$(find "$root.new/root" -type f -perm -u+x \( -name headless_shell -o -name chromium-headless-shell \) -path '*/lib/*' | head -n 1)
    [ -n "$found" ] || die "the package $package has no program that is known here"
    cat >"$root.new/chromium" <<SCRIPT
#!/bin/sh
here=\$(dirname "\$(readlink -f "\$0")")
LD_LIBRARY_PATH=\$(find "\$here/root" -name '*.so*' -printf '%h\n' | sort -u | paste -sd:) exec "\$here/${found#"$root.new/"}" "\$@"
SCRIPT
    chmod +x "$root.new/chromium"
    rm -rf "$root"
    mv "$root.new" "$root"
fi
"$root/chromium" --version >&2 || die "$root/chromium does not start: see above"
echo "$root/chromium"
