#!/usr/bin/env bash
# The checks that take too long to run before every change: an hour and a half on two cores.
#
#   scripts/full.sh               runs all checks, one after the other
#   scripts/full.sh seeds kills   runs only these checks
#
#   seeds     1 000 000 seeds of the simulator, 500 000 of worlds with encoder caches, 10 000 of each foreign protocol
#   fuzz      2 000 000 scripts for the protocol machine, 500 000 for the encoder cache's, 300 000 for each foreign
#             dialect's, 1 000 000 cases for each decoder, and as many of hostile frames; also ten minutes guided by coverage, if cargo-fuzz and a nightly toolchain are installed
#   kills     half an hour of kills and stops of processes, in every mode, over every installed transport
#   stops     50 stops of each side in the middle of large copies, over every installed transport
#   contract  the whole contract of transports, with kills, for every kind of worker of each of them
#   layouts   200 000 pairs of random layouts, with a comparison of every byte
#   garbage   measures what a peer that sends garbage at full speed costs a healthy peer
#
# The variable START is the first seed of the simulator, and SEED the seed of fuzz, kills, stops and layouts. Both
# are random by default, and are printed.
set -euo pipefail
cd "$(dirname "$0")/.."

start=${START:-$((RANDOM * 1000000))}
seed=${SEED:-$RANDOM}
step() { printf '\n==== %s (%s s)\n' "$*" "$SECONDS"; }

seeds() {
    step "simulator, seeds from $start on"
    cargo run --profile bench --locked -p kv-sim -- --worlds kv --seeds 1000000 --start "$start"
    cargo run --profile bench --locked -p kv-sim -- --worlds ec --seeds 500000 --start "$start"
    cargo run --profile bench --locked -p kv-sim -- --worlds interop --seeds 10000 --start "$start"
}
fuzz() {
    step "fuzzing, seed $seed"
    KV_FUZZ_SEED=$seed KV_FUZZ_CASES=2000000 cargo test --profile bench --locked -p kv-fuzz --test machine -- --nocapture
    KV_FUZZ_SEED=$seed KV_FUZZ_CASES=500000 cargo test --profile bench --locked -p kv-fuzz --test entries -- --nocapture
    KV_FUZZ_SEED=$seed KV_FUZZ_CASES=300000 cargo test --profile bench --locked -p kv-fuzz --test dialects -- --nocapture
    # With the decoders of the transports whose libraries are there.
    . scripts/lib/natives.sh
    set_up_natives
    KV_FUZZ_SEED=$seed KV_FUZZ_CASES=1000000 cargo test --profile bench --locked -p kv-fuzz \
        --features "$(IFS=,; echo "${natives[*]}")" --test decoders -- --nocapture
    KV_FUZZ_SEED=$seed KV_FUZZ_CASES=1000000 cargo test --profile bench --locked -p kv-core --test hostile
    if cargo +nightly fuzz --version >/dev/null 2>&1; then
        mkdir -p target/found
        cargo +nightly fuzz run -s none machine target/found fuzz/corpus/machine -- -max_len=2048 -max_total_time=600
    else
        echo "NOT TESTED: fuzzing guided by coverage. It needs a nightly toolchain, and: cargo install cargo-fuzz"
    fi
}
kills() {
    step "kills and stops, seed $seed"
    scripts/kills.sh --seconds 1800 --seed "$seed"
}
stops() {
    step "stops in the middle of copies, seed $seed"
    # The build of scripts/test.sh.
    . scripts/lib/natives.sh
    set_up_natives
    SEED=$seed KV_STOPS=50 cargo test --locked "${what[@]}" --test stops -- --nocapture --test-threads=1
}
contract() {
    step "the contract of transports"
    . scripts/lib/natives.sh
    set_up_natives
    KV_CONTRACT=1 cargo test --locked "${what[@]}" --test transports -- --nocapture
}
layouts() {
    step "layouts, seed $seed"
    KV_LAYOUT_SEED=$seed KV_LAYOUT_CASES=200000 cargo test --profile bench --locked -p kv-core --test layouts
}
garbage() {
    step "garbage at full speed"
    cargo bench --locked -p kv-benches --bench garbage
}

[ $# -gt 0 ] || set -- seeds fuzz kills stops contract layouts garbage
for check in "$@"; do
    case $check in
    seeds | fuzz | kills | stops | contract | layouts | garbage) "$check" ;;
    *)
        sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2
        exit 2
        ;;
    esac
done
step "all checks have passed"
