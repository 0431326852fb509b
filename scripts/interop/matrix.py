#!/usr/bin/env python3
"""Runs our side against unmodified vLLM and SGLang workers, and prints a table. Started by scripts/interop.sh, which
builds what this needs; run with the Python of the peers' environment.
"""
import argparse, itertools, json, os, random, sys, time

import harm, speed
from bench import PAIRS, START, Bench, Shape, Table, Wrong, free_port

PATIENCE = 60    # seconds for what no other bound ends; only a failure takes so long
LEASE = 3        # seconds for which a sending side keeps what nobody takes, in rows of refusals
QUARANTINE = 60  # seconds for which our side may keep pages of a lease that has expired


def shapes(pair, quick):
    """The shapes in which a pair is run."""
    _, dialect, mode = PAIRS[pair]
    ours_sends, vllm = pair.startswith("ours"), dialect == "vllm"
    heads = 2 if vllm else 8
    all_shapes = [Shape(dialect, mode)]
    if quick:
        return all_shapes
    def add(name, **more):
        all_shapes.append(Shape(dialect, mode, name=name, **more))

    # SGLang's writers know no way into host memory that is cut otherwise: our side must say so, and spare them.
    refused = () if vllm or ours_sends else ("mem_kinds",)
    add("our TP 2, their TP 1" + (": refused" if refused else ""), tp=2, heads=heads, refused=refused)
    if vllm:
        add("our TP 1, their TP 2", their_tp=2, heads=2)
        add("our TP 2, their TP 2", tp=2, their_tp=2, heads=2)
    add("MLA", mla=True, heads=1, head_dim=288)
    add("MLA, our TP 2", mla=True, heads=1, head_dim=288, tp=2)
    if vllm:
        add("MLA, their TP 2", mla=True, heads=1, head_dim=288, their_tp=2)
    if vllm or ours_sends:
        add("our memory page-major", page_major=True)
    if vllm:
        unequal_blocks(pair, add)
    if ours_sends or not vllm:
        add("chunked", chunks=3)
    return all_shapes


def unequal_blocks(pair, add):
    """Adds the shapes in which our blocks and those of a vLLM worker have different numbers of tokens."""
    def refused(ours):
        return dict(refused=("block_size", f"{ours} here", "16 at the peer"))

    small, large = dict(block=8, blocks=400, heads=2), dict(block=32, heads=2)
    latents = dict(block=8, blocks=400, heads=1, mla=True, head_dim=288)
    if pair == "vllm-to-ours":
        add("blocks of 32 here, 16 there", **large)
        add("blocks of 8 here, 16 there", **small)
    elif pair == "vllm-to-ours-push":
        # vLLM cuts its blocks into equal runs of bytes: these are blocks of ours only if there is one head.
        add("blocks of 8 here, 16 there, one head", **{**small, "heads": 1})
        add("blocks of 8 here, 16 there: refused", **small, **refused(8))
        add("blocks of 32 here, 16 there: refused", **large, **refused(32))
    elif pair == "ours-to-vllm":
        add("blocks of 8 here, 16 there", **small)
        add("blocks of 32 here, 16 there: refused", **large, refused=("",), refused_by="vLLM")
    else:
        # vLLM's receiver would raise an exception in the step of its engine.
        add("blocks of 8 here, 16 there: refused", **small, **refused(8))
        add("MLA, blocks of 8, 16 there: refused", **latents, **refused(8))


def report(table, pair, shape, line, handshake):
    """A row of what a receiving side has said of a run."""
    n, done, freed = line["n"], line["done"], line.get("p_freed", 0)
    ok = line.get("verify") == "OK" and done == n
    run = line["run"]
    size = line.get("bytes") or n * int(run.split("x")[1]) * shape.bytes_per_peer_block()
    why = next(iter((line.get("failed") or {}).values()), "") if isinstance(line.get("failed"), dict) else line.get("failed") or ""
    why = why or line.get("wrong_bytes") or line.get("rooms") or line.get("quarantine") or line.get("timed_out") or ""
    speed = f"{size / max(line['ms'], 1e-3) / 1e6:.2f}"
    table.row(pair, shape, run, size if ok else 0, "" if handshake is None else f"{handshake:.1f}", speed, f"{freed}/{n}", "ok" if ok else f"BAD: {why}"[:200])


def refusal(table, pair, shape, run, failed, left, freed):
    """A row of requests that must all have failed with a cause that names what differs, and must have left nothing.
    `freed` is the number that the sending side has freed, if that side tells."""
    n = int(run.split("x")[0])
    silent = [name for name, cause in failed.items() if not all(word in cause for word in shape.refused)]
    result = "ok"
    if len(failed) != n or silent:
        result = f"BAD: {len(failed)} of {n} refused; {next((failed[name] for name in silent), '')}"
    elif left or freed not in (n, None):
        result = f"BAD: left behind: {left}, {freed} of {n} freed"
    table.row(pair, shape, run, 0, freed="" if freed is None else f"{freed}/{n}", result=result[:300])


def run_ours_receives(bench, table, pair, quick):
    """A peer that sends, and our side in each shape."""
    title, dialect, mode = PAIRS[pair]
    runs = "1x1,10x4" if quick else "1x1,10x4,100x1"
    by_peer = {}
    for shape in shapes(pair, quick):
        key = (shape.heads, shape.head_dim, shape.mla, shape.their_tp, shape.peer_block, shape.refused)
        by_peer.setdefault(key, []).append(shape)
    for group in by_peer.values():
        port, peer_shape = free_port(), Shape(**{**group[0].__dict__, "blocks": 200})
        try:
            if dialect == "vllm":
                # What we refuse, the peer frees when the lease is over.
                lease = json.dumps({"kv_lease_duration": LEASE}) if peer_shape.refused else None
                peer = bench.vllm("prefill", peer_shape, port=port, ctl=0, extra=lease)
            else:
                peer = bench.sglang("prefill", peer_shape, bootstrap=f"127.0.0.1:{port}", own_bootstrap=True, ctl=0)
            peer.up()
            for shape in group:
                try:
                    ours = bench.ours("decode", shape, bootstrap=f"127.0.0.1:{port}", peer_ctl=peer.url, runs=runs, seed=bench.options.seed)
                    for number, _ in enumerate(runs.split(",")):
                        line = ours.line("run", START)
                        if shape.refused:
                            left = line["quarantine"] or line["timed_out"] or line["pages_out"]
                            freed = line["p_freed"] if dialect == "vllm" else None
                            refusal(table, title, shape, line["run"], line["failed"], left, freed)
                        else:
                            report(table, title, shape, line, line["first_ms"] if number == 0 else None)
                    bench.end(ours)
                except Wrong as wrong:
                    table.row(title, shape, result=f"BAD: {wrong}"[:300])
        except Wrong as wrong:
            table.row(title, group[0], result=f"BAD: {wrong}"[:300])
        finally:
            bench.end()


def run_ours_sends(bench, table, pair, quick):
    """Our side in each shape, and a peer that receives."""
    title, dialect, mode = PAIRS[pair]
    runs = "1x1,10x4" if quick else "1x1,10x4,100x1"
    for shape in shapes(pair, quick):
        port = free_port()
        try:
            if dialect == "sglang":
                ours = bench.ours("prefill", shape, ctl=0, bootstrap=f"127.0.0.1:{port}", own_bootstrap=True)
                ours.up()
                peer = bench.sglang("decode", shape, bootstrap=f"127.0.0.1:{port}", peer_ctl=ours.url, runs=runs)
                lines = ((peer.line("run"), None) for _ in runs.split(","))
            else:
                # What vLLM refuses, our side gets back when the lease is over.
                lease = LEASE if shape.refused_by == "vLLM" else None
                ours = bench.ours("prefill", shape, ctl=0, lease=lease)
                addr = ours.up()["side_channel"]
                if shape.refused:
                    peer = bench.vllm("decode", shape, my_port=free_port(), ctl=0)
                    peer.up()
                    for run in runs.split(","):
                        refused_run(table, title, ours, peer, shape, run, bench.options.seed)
                    continue
                if shape.tp == shape.their_tp == 1 and shape.block == shape.peer_block:
                    peer = bench.vllm("decode", shape, port=addr.rsplit(":")[-1], my_port=free_port(), peer_ctl=ours.url, runs=runs)
                    handshake = peer.line("handshake_ms")["handshake_ms"]
                    totals = itertools.accumulate(int(run.split("x")[0]) for run in runs.split(","))
                    lines = ((own_run(ours, peer, total), handshake if number == 0 else None) for number, total in enumerate(totals))
                else:
                    peer = bench.vllm("decode", shape, my_port=free_port(), ctl=0)
                    peer.up()
                    lines = ((drive_vllm(ours, peer, shape, run, bench.options.seed), None) for run in runs.split(","))
            for line, handshake in lines:
                line.setdefault("p_freed", line["done"] if dialect == "sglang" else 0)
                report(table, title, shape, line, handshake)
        except Wrong as wrong:
            table.row(title, shape, result=f"BAD: {wrong}"[:300])
        finally:
            bench.end()


def lend(ours, shape, run, seed):
    """Lends blocks of ours to a vLLM worker. Answers the names of the requests, and what the worker is asked for."""
    n, blocks = map(int, run.split("x"))
    tokens, width = blocks * shape.peer_block, -(-blocks * shape.peer_block // shape.block)
    requests, asked = [], []
    for i, place in enumerate(random.Random(seed).sample(range(1, shape.blocks // width), n)):
        # The first token is the first one of a block on either side.
        mine = range(place * width, (place + 1) * width)
        first = mine[0] * shape.block // shape.peer_block
        requests.append(dict(id=f"cmpl-{os.getpid()}.{run}-{i}-0-{i:08x}", blocks=list(mine), ntok=tokens))
        asked.append(dict(ntok=tokens, src_blocks=list(range(first, first + blocks)), id=f"{requests[i]['id'][:-8]}{i + 0x10000000:08x}"))
    for request, params in zip(asked, ours.call("finish", {"reqs": requests})["params"]):
        request["params"] = params
    return [request["id"] for request in requests], asked


def until(within, what):
    """Asks until the answer is true, or the time is over. Returns the last answer."""
    end = time.monotonic() + within
    while not (answer := what()) and time.monotonic() < end:
        time.sleep(0.02)
    return answer


def own_run(ours, peer, so_far):
    """What vLLM's driver says of a run for which it has asked us itself, once we have freed the runs so far."""
    line = peer.line("run")
    if freed := until(PATIENCE, lambda: len(ours.call("state")["sent"]) >= so_far):
        line["p_freed"] = line["n"]
    return line if freed else dict(line, verify="BAD")


def drive_vllm(ours, peer, shape, run, seed):
    """Lends blocks of ours to vLLM's receiving side, and waits until all have been given back."""
    names, asked = lend(ours, shape, run, seed)
    line = peer.call("recv", {"reqs": asked, "timeout": PATIENCE})
    until(PATIENCE, lambda: set(names) <= set(ours.call("state")["sent"]))
    freed = len(set(names) & set(ours.call("state")["sent"]))
    right = line["done"] == len(names) and not line["wrong_bytes"] and freed == len(names)
    # The driver counts the bytes of one rank.
    return dict(line, run=run, p_freed=freed, bytes=line["bytes"] * shape.their_tp, verify="OK" if right else "BAD")


def refused_run(table, title, ours, peer, shape, run, seed):
    """A run that one side must refuse. All of our blocks must come back, and vLLM's side must live."""
    names, asked = lend(ours, shape, run, seed)
    # vLLM's receiver is not told of a refusal: it waits for as long as it was asked to.
    line = peer.call("recv", {"reqs": asked, "timeout": LEASE})
    until(PATIENCE + QUARANTINE, lambda: not ours.call("state")["pages_out"])
    state = ours.call("state")
    failed = {name: state["failed"][name] for name in names if name in state["failed"]}
    if shape.refused_by == "vLLM":
        failed = {name: "" for name in line["failed"]}
    if shape.refused_by == "us" and len(line["timed_out"]) != len(names):
        raise Wrong(f"the peer was told something: {line}")
    peer.call("hello")
    left = state["quarantine"] or state["open"] or state["pages_out"]
    refusal(table, title, shape, run, failed, left, len(names) - len(set(names) & set(state["sent"])))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", required=True)
    parser.add_argument("--ours", required=True, help="the built example interop")
    parser.add_argument("--pair", choices=sorted(PAIRS), action="append")
    parser.add_argument("--quick", action="store_true", help="the six pairs in one shape, 1 and 10 requests at once")
    parser.add_argument("--seed", type=int, default=1, help="chooses the blocks of requests")
    parser.add_argument("--harm", action="store_true", help="only the rows in which a side is killed or stopped, or aborts")
    parser.add_argument("--side-by-side", type=int, metavar="ROUNDS", default=0, help="only the comparison with two vLLM workers")
    parser.add_argument("--log", default="interop.log")
    options = parser.parse_args()
    bench = Bench(options)
    try:
        if options.side_by_side:
            return speed.compare(bench, options.side_by_side)
        table = Table()
        for pair in options.pair or PAIRS:
            if not options.harm:
                (run_ours_sends if pair.startswith("ours") else run_ours_receives)(bench, table, pair, options.quick)
        if not options.quick:
            harm.run(bench, table, options.pair or list(PAIRS))
        print(f"{table.count} rows, {table.failed} of them BAD")
        return bool(table.failed)
    finally:
        bench.end()
        bench.log.close()


if __name__ == "__main__":
    sys.exit(main())
