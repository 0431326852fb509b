#!/usr/bin/env bash
# Records what unmodified vLLM and SGLang workers say to each other, for the tests of kv-interop that replay it without
# Python: crates/kv-interop/tests/recordings/.
#
#   scripts/record.sh --peers DIR        DIR as for scripts/interop.sh, whose environment must be installed
#
# Addresses, ports, names and NIXL's own metadata are masked by field, so that two runs give the same files.
set -euo pipefail
cd "$(dirname "$0")/.."

[ $# -eq 2 ] && [ "$1" = --peers ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
peers=$(cd "$2" && pwd)
export PEER=${PEER:-$PWD/target/peers} UCX_NET_DEVICES=${UCX_NET_DEVICES:-lo} PYTHONDONTWRITEBYTECODE=1
python=$PEER/nx/bin/python
[ -x "$python" ] || { echo "error: no environment in $PEER; scripts/interop.sh --peers $peers installs one" >&2; exit 2; }
out=crates/kv-interop/tests/recordings
mkdir -p "$out"
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT

free_port() { "$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# pair NAME DRIVER HEAD COMMON P-OPTIONS D-OPTIONS: runs both sides, and joins what they have said by time.
pair() {
    local name=$1 driver=$2 head=$3 ctl
    ctl=$(free_port)
    read -ra common <<<"$4"
    read -ra prefill <<<"$5"
    read -ra decode <<<"$6"
    echo "== $name" >&2
    "$python" -u scripts/interop/peer.py "$peers" "$driver" --record "$parts/P" -- --role prefill --ctl "$ctl" \
        "${common[@]}" "${prefill[@]}" >"$parts/P.log" 2>&1 &
    local process=$!
    until grep -q '"up"' "$parts/P.log"; do
        kill -0 "$process" || { cat "$parts/P.log" >&2; exit 1; }
        sleep 0.2
    done
    "$python" -u scripts/interop/peer.py "$peers" "$driver" --record "$parts/D" -- --role decode \
        --peer-ctl "http://127.0.0.1:$ctl" "${common[@]}" "${decode[@]}" >"$parts/D.log" 2>&1 ||
        { cat "$parts/D.log" >&2; kill "$process"; exit 1; }
    kill "$process"
    wait "$process" || true
    "$python" - "$head" "$parts/P" "$parts/D" >"$out/$name.jsonl" <<'PYTHON'
import json, sys
print(json.dumps(dict(pair=sys.argv[1])))
lines = [json.loads(line) for path in sys.argv[2:] for line in open(path)]
for line in sorted(lines, key=lambda line: line.pop("time")):
    print(json.dumps(line))
PYTHON
    wc -l "$out/$name.jsonl" >&2
}

vllm="--layers 2 --heads 2 --hd 8 --nblocks 12 --runs 1x1,1x3"
for mode in pull push; do
    port=$(free_port)
    pair "vllm-$mode" vllm_pair "vLLM 0.33.0 P, vLLM 0.33.0 D, $mode" "$vllm --mode $mode" "--port $port" \
        "--port $port --my-port $(free_port)"
done
port=$(free_port)
pair sglang sglang_pair "SGLang 0.5.23 P, SGLang 0.5.23 D" \
    "--bootstrap 127.0.0.1:$port --regions 4 --item 4096 --slots 12 --runs 1x1,1x3" "--own-bootstrap" ""
