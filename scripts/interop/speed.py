"""1000 small requests side by side: pairs with one side of ours, and the pair of two vLLM workers, in turns."""
import signal, statistics

from bench import Shape, free_port

REQUESTS = "1000x1"
# A run of no requests measures what vLLM's driver does besides: it writes zeros to all of its cache.
THEIR_RUNS = ",".join(["0x1", REQUESTS] * 5)
OUR_RUNS = ",".join(["1x1"] + [REQUESTS] * 5)
TOLERANCE = 1.05


def vllm_receives(bench, shape, port, ctl):
    """The times of a new vLLM receiver, less what its driver does besides, and the time of its handshake."""
    peer = bench.vllm("decode", shape, port=port, my_port=free_port(), peer_ctl=ctl, runs=THEIR_RUNS, engine_id=f"D-{free_port()}")
    handshake = peer.line("handshake_ms")["handshake_ms"]
    lines = [peer.line("run") for _ in THEIR_RUNS.split(",")]
    assert all(line["verify"] == "OK" for line in lines), lines
    idle = statistics.median(line["ms"] for line in lines if line["n"] == 0)
    bench.end(peer)
    return [line["ms"] - idle for line in lines if line["n"]], handshake


def ours_receives(bench, shape, ctl):
    """The times of a new receiver of ours, the parsing of parameters included, and the time of its first request's handshake."""
    ours = bench.ours("decode", shape, peer_ctl=ctl, runs=OUR_RUNS)
    lines = [ours.line("run") for _ in OUR_RUNS.split(",")]
    assert all(line["verify"] == "OK" for line in lines), lines
    bench.end(ours)
    return [line["ms"] + line["parse_ms"] for line in lines if line["n"] > 1], lines[0]["first_ms"]


def compare(bench, rounds):
    shape = Shape("vllm", layers=32, heads=1, blocks=1100)
    port = free_port()
    theirs = bench.vllm("prefill", shape, port=port, ctl=0)
    theirs.up()
    ours = bench.ours("prefill", shape, ctl=0)
    addr = ours.up()["side_channel"]
    # The prefill side that does not take part in a pair is stopped: a thread of vLLM's NIXL takes one whole core, idle or not.
    pairs = {
        "vLLM P → vLLM D": (ours, lambda: vllm_receives(bench, shape, port, theirs.url)),
        "vLLM P → our D": (ours, lambda: ours_receives(bench, shape, theirs.url)),
        "our P → vLLM D": (theirs, lambda: vllm_receives(bench, shape, addr.rsplit(":")[-1], ours.url)),
    }
    times, handshakes = {name: [] for name in pairs}, {name: [] for name in pairs}
    for number in range(rounds):
        # Another pair comes first in each round.
        names = list(pairs)
        for name in names[number % 3:] + names[:number % 3]:
            other, receives = pairs[name]
            other.signal(signal.SIGSTOP)
            some, handshake = receives()
            other.signal(signal.SIGCONT)
            times[name] += some
            handshakes[name].append(handshake)
            print(f"round {number + 1}: {name}: {', '.join(f'{ms:.1f}' for ms in some)} ms, handshake {handshake:.1f} ms", flush=True)
    base, base_handshake = (statistics.median(of["vLLM P → vLLM D"]) for of in (times, handshakes))
    print(f"\n{'pair':18}  {'1000 requests, ms':>18}  {'ratio':>6}  {'handshake, ms':>14}  {'ratio':>6}")
    slower = False
    for name in pairs:
        ms, handshake = statistics.median(times[name]), statistics.median(handshakes[name])
        print(f"{name:18}  {ms:18.1f}  {ms / base:6.2f}  {handshake:14.1f}  {handshake / base_handshake:6.2f}")
        slower |= ms > base * TOLERANCE or handshake > base_handshake * TOLERANCE
    return slower
