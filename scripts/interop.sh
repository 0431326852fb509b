#!/usr/bin/env bash
# Runs our side against unmodified vLLM and SGLang workers, without a GPU and without a model, and prints a table.
#
#   scripts/interop.sh --peers DIR                   the whole matrix: 40 minutes on two cores, an hour if they are busy
#   scripts/interop.sh --peers DIR --quick           the six pairs in one shape each
#   scripts/interop.sh --peers DIR --pair vllm-to-ours [--seed 7]
#   scripts/interop.sh --peers DIR --harm            only kills, stops and aborts
#   scripts/interop.sh --peers DIR --side-by-side 3  1000 small requests, in three rounds: ours against two vLLM workers
#
# DIR holds the drivers vllm_pair.py and sglang_pair.py, and setup.sh, which installs vLLM and SGLang for them under the
# folder that the variable PEER names (default: target/peers); docs/INTEROP.md says what DIR must provide. The
# installation takes 7.5 GB and ten minutes, once. The exit status is 1 if any row of the table is wrong.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '== %s (%s s)\n' "$*" "$SECONDS" >&2; }
usage() {
    sed -n '2,14s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

peers='' rest=()
while [ $# -gt 0 ]; do
    case $1 in
    --peers) [ $# -ge 2 ] || usage; peers=$2; shift 2 ;;
    -h | --help) usage ;;
    *) rest+=("$1"); shift ;;
    esac
done
[ -n "$peers" ] || usage
peers=$(cd "$peers" && pwd)
for file in setup.sh vllm_pair.py sglang_pair.py; do
    [ -f "$peers/$file" ] || { echo "error: $peers/$file is missing; see docs/INTEROP.md" >&2; exit 2; }
done

export PEER=${PEER:-$PWD/target/peers}
if [ ! -x "$PEER/nx/bin/python" ] || [ ! -d "$PEER/dl/vl/vllm" ] || [ ! -d "$PEER/dl/sg/sglang" ]; then
    step "installing vLLM and SGLang under $PEER: 7.5 GB, ten minutes"
    mkdir -p "$PEER"
    "$peers/setup.sh"
fi
PEER=$(cd "$PEER" && pwd)

step "setting up NIXL"
settings=$(scripts/setup-nixl.sh --print) || exit 2
eval "$settings"
step "building our side"
cargo build --release --locked -p kv-interop-pairs --features nixl --example interop

# Both sides are on this host: UCX finds the way between them by the loopback device.
export UCX_NET_DEVICES=${UCX_NET_DEVICES:-lo}
export PYTHONDONTWRITEBYTECODE=1
step "running"
"$PEER/nx/bin/python" -u scripts/interop/matrix.py --peers "$peers" \
    --ours "${CARGO_TARGET_DIR:-target}/release/examples/interop" --log target/interop.log "${rest[@]}"
