#!/usr/bin/env python3
"""Runs our side against unmodified vLLM and SGLang workers, and prints a table. Started by scripts/interop.sh, which
builds what this needs; run with the Python of the peers' environment.
"""
import argparse, os, sys, time

import harm, speed
from bench import PAIRS, START, Bench, Shape, Table, Wrong, free_port


def shapes(pair, quick):
    """The shapes in which a pair is run."""
    _, dialect, mode = PAIRS[pair]
    ours_sends, vllm = pair.startswith("ours"), dialect == "vllm"
    heads = 2 if vllm else 8
    all_shapes = [Shape(dialect, mode)]
    if quick:
        return all_shapes
    # SGLang's writers know no way into host memory that is cut otherwise: our side must say so, and spare them.
    name = "our TP 2, their TP 1" + ("" if vllm or ours_sends else ": refused")
    all_shapes.append(Shape(dialect, mode, name=name, tp=2, heads=heads, refused=not vllm and not ours_sends))
    all_shapes.append(Shape(dialect, mode, name="MLA", mla=True, heads=1, head_dim=288))
    all_shapes.append(Shape(dialect, mode, name="MLA, our TP 2", mla=True, heads=1, head_dim=288, tp=2))
    if vllm or ours_sends:
        all_shapes.append(Shape(dialect, mode, name="our memory page-major", page_major=vllm or None))
    if vllm:
        # vLLM's receivers take only blocks that theirs are a multiple of.
        if not ours_sends:
            all_shapes.append(Shape(dialect, mode, name="our blocks of 32 tokens, theirs of 16", block=32, heads=2))
        all_shapes.append(Shape(dialect, mode, name="our blocks of 8 tokens, theirs of 16", block=8, blocks=400, heads=2))
    if ours_sends or not vllm:
        all_shapes.append(Shape(dialect, mode, name="chunked", chunks=3))
    return [shape for shape in all_shapes if shape.page_major is not None]


def report(table, pair, shape, line, handshake):
    """A row of what a receiving side has said of a run."""
    n, done, freed = line["n"], line["done"], line.get("p_freed", 0)
    ok = line.get("verify") == "OK" and done == n
    if shape.refused:
        causes = set((line.get("failed") or {}).values())
        refused = len(line["failed"]) == n and all("mem_kinds" in cause for cause in causes) and line["ms"] < 5000
        table.row(pair, shape, line["run"], 0, result="ok" if refused else f"BAD: {causes}"[:200])
        return
    run = line["run"]
    size = line.get("bytes") or n * int(run.split("x")[1]) * shape.bytes_per_peer_block()
    why = next(iter((line.get("failed") or {}).values()), "") if isinstance(line.get("failed"), dict) else line.get("failed") or ""
    why = why or line.get("wrong_bytes") or line.get("rooms") or line.get("quarantine") or ""
    speed = f"{size / max(line['ms'], 1e-3) / 1e6:.2f}"
    table.row(pair, shape, run, size if ok else 0, "" if handshake is None else f"{handshake:.1f}", speed, f"{freed}/{n}", "ok" if ok else f"BAD: {why}"[:200])


def run_ours_receives(bench, table, pair, quick):
    """A peer that sends, and our side in each shape."""
    title, dialect, mode = PAIRS[pair]
    runs = "1x1,10x4" if quick else "1x1,10x4,100x1"
    by_peer = {}
    for shape in shapes(pair, quick):
        by_peer.setdefault((shape.heads, shape.head_dim, shape.mla, shape.peer_block), []).append(shape)
    for group in by_peer.values():
        port, peer_shape = free_port(), Shape(**{**group[0].__dict__, "blocks": 200})
        try:
            if dialect == "vllm":
                peer = bench.vllm("prefill", peer_shape, port=port, ctl=0)
            else:
                peer = bench.sglang("prefill", peer_shape, bootstrap=f"127.0.0.1:{port}", own_bootstrap=True, ctl=0)
            peer.up()
            for shape in group:
                try:
                    ours = bench.ours("decode", shape, bootstrap=f"127.0.0.1:{port}", peer_ctl=peer.url, runs=runs, seed=bench.options.seed)
                    for number, _ in enumerate(runs.split(",")):
                        line = ours.line("run", START)
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
                ours = bench.ours("prefill", shape, ctl=0)
                addr = ours.up()["side_channel"]
                if shape.tp == 1 and shape.block == shape.peer_block:
                    peer = bench.vllm("decode", shape, port=addr.rsplit(":")[-1], my_port=free_port(), peer_ctl=ours.url, runs=runs)
                    handshake = peer.line("handshake_ms")["handshake_ms"]
                    lines = ((peer.line("run"), handshake if number == 0 else None) for number, _ in enumerate(runs.split(",")))
                else:
                    peer = bench.vllm("decode", shape, my_port=free_port(), ctl=0)
                    peer.up()
                    lines = ((drive_vllm(ours, peer, shape, run, number), None) for number, run in enumerate(runs.split(",")))
            for line, handshake in lines:
                line.setdefault("p_freed", line["done"] if dialect == "sglang" else 0)
                report(table, title, shape, line, handshake)
        except Wrong as wrong:
            table.row(title, shape, result=f"BAD: {wrong}"[:300])
        finally:
            bench.end()


def drive_vllm(ours, peer, shape, run, number):
    """Lends blocks of ours to vLLM's receiving side, and waits until all have been given back."""
    n, blocks = map(int, run.split("x"))
    tokens, width = blocks * shape.peer_block, -(-blocks * shape.peer_block // shape.block)
    requests, sources = [], []
    for i in range(n):
        mine = list(range(1 + i * width, 1 + (i + 1) * width))
        first = mine[0] * shape.block // shape.peer_block
        sources.append(list(range(first, first + blocks)))
        requests.append(dict(id=f"cmpl-{os.getpid()}.{number}-{i}-0-{i:08x}", blocks=mine, ntok=tokens))
    params = ours.call("finish", {"reqs": requests})["params"]
    asked = [dict(params=p, ntok=tokens, src_blocks=s, id=f"{q['id'][:-8]}{i + 0x10000000:08x}") for i, (p, q, s) in enumerate(zip(params, requests, sources))]
    line = peer.call("recv", {"reqs": asked, "timeout": 30})
    wanted, end = {q["id"] for q in requests}, time.monotonic() + 10
    while not wanted <= set(ours.call("state")["sent"]) and time.monotonic() < end:
        time.sleep(0.01)
    freed = len(wanted & set(ours.call("state")["sent"]))
    right = line["done"] == n and not line["wrong_bytes"] and freed == n
    return dict(line, run=run, p_freed=freed, verify="OK" if right else "BAD")


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
