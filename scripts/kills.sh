#!/usr/bin/env bash
# Kills and stops processes of the example pd at random moments, and checks what becomes of every request.
#
#   scripts/kills.sh                              for three minutes, with a new seed, over every installed transport
#   scripts/kills.sh --seconds 1800 --seed 7      for half an hour, with the runs of seed 7
#   scripts/kills.sh --transport local            over kv-local only (or: tcp, auto, nixl, ucx, fabric)
#   scripts/kills.sh --pd FILE                    with this build of the example, instead of a new one
#
# Each run is the example pd with 2 prefill and 2 decode processes, and with timeouts of a second at most. One
# process is killed, stopped for ever, or stopped for longer than every timeout and then resumed, at a moment drawn
# from the seed, in push, pull or auto mode. A run is bad if a request does not end, a token differs from the run in
# one process, a surviving or resumed process keeps a page or does not serve afterwards, or the run does not end.
# The script goes on after a bad run. At the end it prints each bad run with the command that repeats it, and exits
# with status 1 if there was one. Runs over NIXL, UCX and libfabric need what scripts/setup-nixl.sh, setup-ucx.sh and
# setup-fabric.sh need; where that is missing, they are left out, and the output says so. Over UCX, which reads nothing
# over TCP, the modes are push and auto.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
}
number() { [[ $2 =~ ^[0-9]{1,9}$ ]] || { printf 'error: %s needs a number of at most nine digits, and got %s\n' "$1" "$2" >&2; exit 2; }; }

seconds=180
seed=$((RANDOM << 15 | RANDOM))
transport=all
pd=
while [ $# -gt 0 ]; do
    [ $# -gt 1 ] || usage
    case $1 in
    --seconds) number "$1" "$2"; seconds=$2 ;;
    --seed) number "$1" "$2"; seed=$2 ;;
    --transport) transport=$2 ;;
    --pd) pd=$2 ;;
    *) usage ;;
    esac
    shift 2
done
case $transport in local | tcp | auto | nixl | ucx | fabric | all) ;; *) usage ;; esac

# A run that takes longer than this many seconds hangs. The slowest runs, stops on a busy machine, take about ten.
limit=90
# Milliseconds: longer than all timeouts of --timing fast together.
stopped=3000

step() { printf '== %s\n' "$*" >&2; }
step "seed $seed, $seconds s"
transports=()
case $transport in local | all) transports+=(local) ;; esac
case $transport in tcp | all) transports+=(tcp) ;; esac
case $transport in auto | all) transports+=(auto) ;; esac
features=()
untested=()
for library in nixl ucx fabric; do
    [ "$transport" = "$library" ] || [ "$transport" = all ] || continue
    if settings=$("scripts/setup-$library.sh" --print); then
        eval "$settings"
        transports+=("$library")
        features+=(--features "$library")
    else
        untested+=("NOT TESTED: $library, for the reason that scripts/setup-$library.sh gives above")
        printf '%s\n' "${untested[-1]}" >&2
        [ "$transport" != "$library" ] || exit 1
    fi
done
if [ -z "$pd" ]; then
    step "building"
    cargo build --release --locked "${features[@]}" --example pd
    pd=${CARGO_TARGET_DIR:-target}/release/examples/pd
fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# A copy, so that another build in the meantime does not change what runs.
cp "$pd" "$out/pd"

# Random numbers from the seed (Lehmer's generator), so that the same seed has the same runs.
state=$((seed % 2147483646 + 1))
draw() {
    state=$((state * 48271 % 2147483647))
    drawn=$((state % $1))
}

# field NAME: prints a number of the totals of the report.
field() { sed -n "s/.*\"totals\":{[^}]*\"$1\":\([0-9.]*\).*/\1/p" "$out/json"; }
problems() { sed -n 's/.*"problems":\[\(.*\)\]}$/\1/p' "$out/json"; }

harms=("kill prefill" "kill decode" "stop prefill" "stop decode" "stop prefill, resume" "stop decode, resume")
modes=(push pull auto)
declare -A runs failed_runs answered lost
bad=()
number=0
end=$((SECONDS + seconds))
printf '%5s %-5s %-21s %-6s %6s %4s %7s %7s %7s  %s\n' run mode what transport at/ms ok failed leaked ms verdict
while [ "$SECONDS" -lt "$end" ]; do
    # Each combination has its turn before any comes again. The step is a prime, so that neighbours differ in all three, and a
    # short run has some of everything. Where to begin depends on the seed, and the moment is random.
    combination=$(((seed + number) * 41 % (${#harms[@]} * ${#modes[@]} * ${#transports[@]})))
    transport=${transports[combination % ${#transports[@]}]}
    mode=${modes[combination / ${#transports[@]} % ${#modes[@]}]}
    harm=${harms[combination / ${#transports[@]} / ${#modes[@]}]}
    [ "$transport-$mode" != ucx-pull ] || mode=push
    draw 700
    at=$drawn
    draw 1000000
    prompts=$drawn
    # In about every third run, decode processes have so few pages that requests wait there for room.
    draw 3
    few=$([ "$drawn" -eq 0 ] && echo 40 || echo 512)
    read -r verb side more <<<"${harm/,/}"
    args=(--timing fast --transport "$transport" --mode "$mode" "--$verb" "$side" --at "$at" --seed "$prompts" --pages "$few"
        --requests 8 --max-new-tokens 24)
    [ -z "$more" ] || args+=(--resume "$stopped")
    began=$(date +%s%N)
    status=0
    timeout -k 5 "$limit" "$out/pd" "${args[@]}" --json >"$out/json" 2>"$out/errors" || status=$?
    took=$((($(date +%s%N) - began) / 1000000))
    number=$((number + 1))
    case $status in
    0) verdict=ok ;;
    124 | 137) verdict="BAD: the run has not ended within $limit s" ;;
    *) verdict="BAD: $(problems)$(tail -n 2 "$out/errors" | tr '\n' ' ')" ;;
    esac
    ok=$(field ok) failed=$(field failed) leaked=$(field pages_leaked)
    printf '%5s %-5s %-21s %-6s %6s %4s %7s %7s %7s  %s\n' \
        "$number" "$mode" "$harm" "$transport" "$at" "${ok:--}" "${failed:--}" "${leaked:--}" "$took" "$verdict"
    kind="$harm|$transport"
    runs[$kind]=$((${runs[$kind]:-0} + 1))
    answered[$kind]=$((${answered[$kind]:-0} + ${ok:-0}))
    lost[$kind]=$((${lost[$kind]:-0} + ${failed:-0}))
    if [ "$status" -ne 0 ]; then
        failed_runs[$kind]=$((${failed_runs[$kind]:-0} + 1))
        replay="cargo run --release --example pd ${features[*]} -- ${args[*]}"
        bad+=("$verdict"$'\n'"        $replay")
    fi
done

printf '\n%-21s %-6s %6s %6s %10s %10s\n' what transport runs bad 'ok' failed
for harm in "${harms[@]}"; do
    for transport in "${transports[@]}"; do
        kind="$harm|$transport"
        printf '%-21s %-6s %6s %6s %10s %10s\n' "$harm" "$transport" \
            "${runs[$kind]:-0}" "${failed_runs[$kind]:-0}" "${answered[$kind]:-0}" "${lost[$kind]:-0}"
    done
done
[ "${#untested[@]}" -eq 0 ] || printf '%s\n' "${untested[@]}"
printf '%s runs of seed %s, %s bad\n' "$number" "$seed" "${#bad[@]}"
for run in "${bad[@]}"; do printf '  %s\n' "$run"; done
[ "${#bad[@]}" -eq 0 ]
