"""Rows in which a side is killed, stopped, or aborts, in the middle of a transfer."""
import json, signal, threading, time

import zmq

from bench import PAIRS, Shape, Wrong, free_port

REQUESTS, BLOCKS, AFTER = 60, 4, 3
LEASE = 6        # seconds for which a prefill side keeps blocks of which it hears nothing
TIMEOUT = 10     # seconds for which a request may take
PATIENCE = 120   # seconds for what no other bound ends; only a failure takes so long
TRIES = 5        # how often a scenario is tried until its signal comes before the end of the transfer


class Through(Exception):
    """All requests were through before the signal: the row has shown nothing, and is tried again."""


def big(pair, variant):
    """A cache of half a gigabyte, of which all is moved."""
    _, dialect, mode = PAIRS[pair]
    heads, head_dim, layers = 8, 128 if dialect == "vllm" else 256, 16 if dialect == "sglang" else 32
    if variant.get("mla"):
        heads, head_dim, layers = 1, heads * head_dim, 32
    return Shape(dialect, mode, layers=layers, heads=heads, head_dim=head_dim, blocks=REQUESTS * BLOCKS + 10, **variant)


class Sides:
    """Both sides of a pair, with requests of the sending side."""

    def __init__(self, bench, pair, variant):
        self.bench, self.pair, self.shape = bench, pair, big(pair, variant)
        self.ours_sends, self.vllm = pair.startswith("ours"), self.shape.dialect == "vllm"
        self.port, self.number = free_port(), 0
        self.start_sender()
        self.start_receiver()

    def start_sender(self):
        bench, shape, addr = self.bench, self.shape, f"127.0.0.1:{self.port}"
        if self.ours_sends:
            more = dict(port=self.port) if self.vllm else dict(bootstrap=addr, own_bootstrap=True)
            self.sender = bench.ours("prefill", shape, ctl=0, lease=LEASE, timeout=TIMEOUT, **more)
        elif self.vllm:
            self.sender = bench.vllm("prefill", shape, port=self.port, ctl=0, extra=json.dumps({"kv_lease_duration": LEASE}))
        else:
            self.sender = bench.sglang("prefill", shape, bootstrap=addr, own_bootstrap=True, ctl=0)
        self.sender.up()

    def start_receiver(self):
        bench, shape, addr = self.bench, self.shape, f"127.0.0.1:{self.port}"
        if not self.ours_sends:
            self.receiver = bench.ours("decode", shape, ctl=0, bootstrap=addr)
        elif self.vllm:
            self.receiver = bench.vllm("decode", shape, my_port=free_port(), ctl=0, engine_id=f"D-{free_port()}")
        else:
            self.receiver = bench.sglang("decode", shape, bootstrap=addr, ctl=0)
        self.receiver.up()

    def transfer(self, count=REQUESTS, during=None, **conditions):
        """Moves requests; answers what the receiving side says, or the error, and what the sending side says."""
        self.number += 1
        first = [1 + i * BLOCKS for i in range(count)]
        blocks = [list(range(at, at + BLOCKS)) for at in first]
        answers = {}

        def ask(who, process, command, body):
            try:
                answers[who] = process.call(command, body, TIMEOUT * 6)
            except (Wrong, OSError) as wrong:
                answers[who] = {"gone": str(wrong)}

        if self.vllm:
            self.names = [f"cmpl-{self.number}-{i}-0-{i:08x}" for i in range(count)]
            tokens = BLOCKS * self.shape.block
            reqs = [dict(id=name, blocks=b, ntok=tokens) for name, b in zip(self.names, blocks)]
            params = self.sender.call("finish", {"reqs": reqs})["params"]
            asked = [dict(params=p, ntok=tokens, src_blocks=b, id=f"{n[:-8]}{i + 0x10000000:08x}") for i, (p, b, n) in enumerate(zip(params, blocks, self.names))]
            sending = None
        else:
            self.names = [str(1000 + self.port * 1000 + self.number * 100 + i) for i in range(count)]
            reqs = [dict(room=int(room), pages=b) for room, b in zip(self.names, blocks)]
            sending = threading.Thread(target=ask, args=("sender", self.sender, "send", {"reqs": reqs, "timeout": TIMEOUT}))
            sending.start()
            asked = [dict(room=int(room), pages=b, src_pages=b) for room, b in zip(self.names, blocks)]
        receiving = threading.Thread(target=ask, args=("receiver", self.receiver, "recv", {"reqs": asked, "timeout": TIMEOUT, **conditions}))
        receiving.start()
        if during:
            during()
        receiving.join()
        if sending:
            sending.join()
        return answers.get("receiver", {}), answers.get("sender", {})

    def freed(self, within=PATIENCE):
        """How many requests the sending side has freed, whether by an end or by a lease."""
        end = time.monotonic() + within
        while True:
            state = self.sender.call("state")
            ended = set(state.get("sent", [])) | set(state.get("failed", {})) if not state.get("pages_out") else set()
            if not self.ours_sends:
                ended = set(state["sent"]) if self.vllm else {r for r in self.names if r not in state["status"] or state["status"][r] in (0, 4)}
            count = len(ended & set(self.names))
            if count == len(self.names) or time.monotonic() > end:
                return count, state
            time.sleep(0.1)


def require(true, why):
    if not true:
        raise Wrong(str(why)[:300])


def in_time(done):
    if done == REQUESTS:
        raise Through


def wrong_bytes(report):
    """The requests that a receiving side calls received, and whose bytes differ: vLLM's report, or SGLang's rooms."""
    rooms = report.get("rooms", {}).items()
    return {**report.get("wrong_bytes", {}), **{room: of["wrong"] for room, of in rooms if of["status"] == 4 and of.get("wrong")}}


def received(sides, report):
    """How many requests have arrived; every other one must have failed with a cause, and no byte may be wrong."""
    done, n = report["done"], report["n"]
    # vLLM calls a request received and failed if blocks of it did not arrive.
    failed = set(report.get("failed", ())) if sides.ours_sends else set()
    wrong = {name: count for name, count in wrong_bytes(report).items() if name not in failed}
    require(not wrong, f"wrong bytes: {wrong}, {len(failed)} failed, {len(report.get('timed_out', ()))} timed out")
    if sides.ours_sends and sides.vllm:
        done = n - len(report["timed_out"]) - len(failed)
    if not sides.ours_sends:
        require(not report["timed_out"], f"never ended: {report['timed_out'][:3]}")
        require(done + len(report["failed"]) == n, report)
    return done


def back(process, within=PATIENCE):
    """Waits until all pages of our side are back."""
    end = time.monotonic() + within
    while (state := process.call("state"))["pages_out"] and time.monotonic() < end:
        time.sleep(0.1)
    require(not state["pages_out"], f"pages are not back: {state}")


def goes_on(sides):
    """The pair moves one more request."""
    end = time.monotonic() + PATIENCE
    while True:
        report, _ = sides.transfer(1)
        if report.get("done") == 1 and not report.get("failed"):
            require(not wrong_bytes(report), f"wrong bytes afterwards: {wrong_bytes(report)}")
            return
        require(time.monotonic() < end, f"does not go on: {report}")
        time.sleep(1)


def their_sender(sides, which):
    """The peer that sends to us is killed, or stopped and continued."""
    pid = sides.sender.process.pid
    report, _ = sides.transfer(harm=dict(pid=pid, signal=which, after=AFTER), settle=30 if which == "KILL" else 1)
    done = received(sides, report)
    if which == "STOP":
        held = report["pages_out"]
        require(not held or report["quarantine"], "pages are out, and no quarantine says why")
        sides.sender.signal(signal.SIGCONT)
        freed, _ = sides.freed()
        if sides.vllm and sides.shape.mode == "push":
            # vLLM has forgotten requests whose lease is over, and says nothing of them: only its end frees our pages.
            state = sides.receiver.call("state")
            require(not state["pages_out"] or state["quarantine"], "pages are out, and no quarantine says why")
            sides.bench.end(sides.sender)
            back(sides.receiver)
            sides.start_sender()
        back(sides.receiver)
        goes_on(sides)
        return done, f"{freed}/{REQUESTS}"
    in_time(done)
    back(sides.receiver)
    sides.bench.end(sides.sender)
    sides.start_sender()
    goes_on(sides)
    return done, "dead"


def their_side_channel(sides, _):
    """A message of a wrong form ends the thread of the peer's side channel. The peer lives, and may write on."""
    def nonsense():
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(f"tcp://127.0.0.1:{sides.port}")
        socket.send(b"\xc1")
        socket.close()

    goes_on(sides)
    report, _ = sides.transfer(during=nonsense)
    done = received(sides, report)
    in_time(done)
    require(sides.sender.alive(), "the peer is dead")
    state = sides.receiver.call("state")
    require(not state["pages_out"] or state["quarantine"], "pages are out, and no quarantine says why")
    sides.bench.end(sides.sender)
    back(sides.receiver)
    sides.start_sender()
    goes_on(sides)
    return done, "dead"


def our_receiver(sides, which):
    """Our side dies while it receives. The peer frees its blocks, and serves the next one of us."""
    after = (lambda: time.sleep(TIMEOUT / 2)) if which == "STOP" else None
    if which == "STOP":
        threading.Timer(TIMEOUT, lambda: sides.receiver.signal(signal.SIGCONT)).start()
    report, sent = sides.transfer(during=after, harm=dict(signal=which, after=AFTER))
    freed, state = sides.freed()
    require(sides.sender.alive(), "the peer is dead")
    require(freed == REQUESTS, f"the peer frees {freed} of {REQUESTS}")
    if which == "KILL":
        sides.bench.end(sides.receiver)
        sides.start_receiver()
        done = 0
    else:
        done = received(sides, report)
        back(sides.receiver)
    goes_on(sides)
    return done, f"{freed}/{REQUESTS}"


def their_receiver(sides, which):
    """The peer that reads from us, or that we write to, dies or stops."""
    sides.sender.call("harm", {"harm": dict(pid=sides.receiver.process.pid, signal=which, after=AFTER)})
    if which == "STOP":
        threading.Timer(TIMEOUT, lambda: sides.receiver.signal(signal.SIGCONT)).start()
    report, _ = sides.transfer()
    back(sides.sender)
    freed, _ = sides.freed(1)
    require(freed == REQUESTS, f"{freed} of {REQUESTS} have ended")
    if which == "KILL":
        sides.bench.end(sides.receiver)
        sides.start_receiver()
    goes_on(sides)
    return report.get("done", 0), f"{freed}/{REQUESTS}"


def our_sender(sides, which):
    """Our side dies while it sends. The peer lives, and takes from the next one of us at the same address."""
    sides.sender.call("harm", {"harm": dict(signal=which, after=AFTER)})
    if which == "STOP":
        threading.Timer(TIMEOUT / 2, lambda: sides.sender.signal(signal.SIGCONT)).start()
    report, _ = sides.transfer()
    require(sides.receiver.alive(), "the peer is dead")
    require("done" in report, report)
    done, freed = received(sides, report), "dead"
    if which == "KILL":
        in_time(done)
        sides.bench.end(sides.sender)
        sides.start_sender()
    else:
        back(sides.sender)
        freed = f"{sides.freed(1)[0]}/{REQUESTS}"
    goes_on(sides)
    return done, freed


def our_abort(sides, _):
    """Our side aborts what is left after some requests."""
    if sides.ours_sends:
        if sides.vllm:
            def abort():
                sides.sender.call("abort", {"ids": sides.names[AFTER:]})
        else:
            def abort():
                time.sleep(0.05)
                sides.sender.call("abort", {"ids": sides.names[AFTER:]})
        report, _ = sides.transfer(during=abort)
        require(sides.receiver.alive(), "the peer is dead")
        require("done" in report, report)
        back(sides.sender)
        freed, state = sides.freed(1)
    else:
        report, _ = sides.transfer(abort_after=AFTER)
        back(sides.receiver)
        freed, state = sides.freed()
    done = received(sides, report)
    require(freed == REQUESTS, f"{freed} of {REQUESTS} are freed: {str(state)[:200]}")
    goes_on(sides)
    return done, f"{freed}/{REQUESTS}"


def scenarios(pair, variant):
    """The rows of a pair: all of them in the plain shape, and only deaths in the others."""
    sends = pair.startswith("ours")
    theirs, ours = (their_receiver, our_sender) if sends else (their_sender, our_receiver)
    yield from [("our side aborts", our_abort, "")] if not variant else []
    if pair.startswith("vllm") and not variant:
        yield "their side channel ends", their_side_channel, ""
    for which, word in (("KILL", "killed"), ("STOP", "stopped")):
        if which == "KILL" or not variant:
            yield f"their side is {word}", theirs, which
            yield f"our side is {word}", ours, which


def variants(pair):
    """The shapes of the caches of a pair, each with its name."""
    yield "", {}
    # SGLang's writers know no way into host memory that is cut otherwise.
    if pair != "sglang-to-ours":
        yield ", our TP 2", dict(tp=2)
    yield ", MLA, our TP 2", dict(tp=2, mla=True)


def run(bench, table, pairs):
    for pair in pairs:
        for title, variant in variants(pair):
            sides = None
            for name, scenario, which in scenarios(pair, variant):
                sides = row(bench, table, (pair, name + title), sides, variant, lambda sides: scenario(sides, which))
            bench.end()


def row(bench, table, name, sides, variant, scenario):
    """A row of the table. Returns the sides, if the next row can go on with them."""
    pair, shape = name
    title, requests = PAIRS[pair][0], f"{REQUESTS}x{BLOCKS}"
    try:
        for _ in range(TRIES):
            sides = sides or Sides(bench, pair, variant)
            goes_on(sides)
            try:
                done, freed = scenario(sides)
            except Through:
                bench.end()
                sides = None
                continue
            size = done * BLOCKS * sides.shape.bytes_per_peer_block()
            table.row(title, shape, requests, size, freed=freed)
            return sides
        raise Wrong(f"all requests were through before the signal, {TRIES} times")
    except (Wrong, KeyError) as wrong:
        table.row(title, shape, requests, result=f"BAD: {wrong!r}"[:400])
        bench.end()
        return None
