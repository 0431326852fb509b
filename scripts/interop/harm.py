"""Rows in which a side is killed, stopped, or aborts, in the middle of a transfer."""
import json, signal, threading, time

from bench import PAIRS, Shape, Wrong, free_port

REQUESTS, BLOCKS, AFTER = 60, 4, 3
LEASE = 6        # seconds for which a prefill side keeps blocks of which it hears nothing
TIMEOUT = 10     # seconds for which a request may take


def big(pair):
    """A cache of half a gigabyte, of which all is moved."""
    _, dialect, mode = PAIRS[pair]
    head_dim = 128 if dialect == "vllm" else 256
    return Shape(dialect, mode, layers=16 if dialect == "sglang" else 32, heads=8, head_dim=head_dim, blocks=REQUESTS * BLOCKS + 10)


class Sides:
    """Both sides of a pair, with requests of the sending side."""

    def __init__(self, bench, pair):
        self.bench, self.pair, self.shape = bench, pair, big(pair)
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

    def freed(self, within):
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


def received(sides, report):
    """How many requests have arrived; every other one must have failed with a cause, and no byte may be wrong."""
    done, n = report["done"], report["n"]
    # vLLM calls a request received and failed if blocks of it did not arrive.
    failed = set(report.get("failed", ())) if sides.ours_sends else set()
    wrong = {name: count for name, count in report.get("wrong_bytes", {}).items() if name not in failed}
    require(not wrong, f"wrong bytes: {wrong}")
    if sides.ours_sends and sides.vllm:
        done = n - len(report["timed_out"]) - len(failed)
    if not sides.ours_sends:
        require(not report["timed_out"], f"never ended: {report['timed_out'][:3]}")
        require(done + len(report["failed"]) == n, report)
    return done


def back(process, within):
    """Waits until all pages of our side are back."""
    end = time.monotonic() + within
    while (state := process.call("state"))["pages_out"] and time.monotonic() < end:
        time.sleep(0.1)
    require(not state["pages_out"], f"pages are not back: {state}")


def goes_on(sides):
    """The pair moves one more request."""
    for _ in range(3):
        report, _ = sides.transfer(1)
        if report.get("done") == 1:
            return
        time.sleep(2)
    raise Wrong(f"does not go on: {report}")


def their_sender(sides, which):
    """The peer that sends to us is killed, or stopped and continued."""
    pid = sides.sender.process.pid
    report, _ = sides.transfer(harm=dict(pid=pid, signal=which, after=AFTER), settle=30 if which == "KILL" else 1)
    done = received(sides, report)
    if which == "STOP":
        held = report["pages_out"]
        require(not held or report["quarantine"], "pages are out, and no quarantine says why")
        sides.sender.signal(signal.SIGCONT)
        freed, _ = sides.freed(LEASE * 5)
        if sides.vllm and sides.shape.mode == "push":
            # vLLM has forgotten requests whose lease is over, and says nothing of them: only its end frees our pages.
            state = sides.receiver.call("state")
            require(not state["pages_out"] or state["quarantine"], "pages are out, and no quarantine says why")
            sides.bench.end(sides.sender)
            back(sides.receiver, 60)
            sides.start_sender()
        back(sides.receiver, 60)
        goes_on(sides)
        return done, f"{freed}/{REQUESTS}"
    require(done < REQUESTS, "all were through before the signal")
    back(sides.receiver, 60)
    sides.bench.end(sides.sender)
    sides.start_sender()
    goes_on(sides)
    return done, "dead"


def our_receiver(sides, which):
    """Our side dies while it receives. The peer frees its blocks, and serves the next one of us."""
    after = (lambda: time.sleep(TIMEOUT / 2)) if which == "STOP" else None
    if which == "STOP":
        threading.Timer(TIMEOUT, lambda: sides.receiver.signal(signal.SIGCONT)).start()
    report, sent = sides.transfer(during=after, harm=dict(signal=which, after=AFTER))
    freed, state = sides.freed(LEASE * 5)
    require(sides.sender.alive(), "the peer is dead")
    require(freed == REQUESTS, f"the peer frees {freed} of {REQUESTS}")
    if which == "KILL":
        sides.bench.end(sides.receiver)
        sides.start_receiver()
        done = 0
    else:
        done = received(sides, report)
        back(sides.receiver, 60)
    goes_on(sides)
    return done, f"{freed}/{REQUESTS}"


def their_receiver(sides, which):
    """The peer that reads from us, or that we write to, dies or stops."""
    sides.sender.call("harm", {"harm": dict(pid=sides.receiver.process.pid, signal=which, after=AFTER)})
    if which == "STOP":
        threading.Timer(TIMEOUT, lambda: sides.receiver.signal(signal.SIGCONT)).start()
    report, _ = sides.transfer()
    back(sides.sender, 90)
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
        require(done < REQUESTS, "all were through before the signal")
        sides.bench.end(sides.sender)
        sides.start_sender()
    else:
        back(sides.sender, 90)
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
        back(sides.sender, 90)
        freed, state = sides.freed(1)
    else:
        report, _ = sides.transfer(abort_after=AFTER)
        back(sides.receiver, 60)
        freed, state = sides.freed(LEASE * 5)
    done = received(sides, report)
    require(freed == REQUESTS, f"{freed} of {REQUESTS} are freed: {str(state)[:200]}")
    goes_on(sides)
    return done, f"{freed}/{REQUESTS}"


def run(bench, table, pairs):
    for pair in pairs:
        title = PAIRS[pair][0]
        sends = pair.startswith("ours")
        rows = [("our side aborts", our_abort, "")]
        for which, word in (("KILL", "killed"), ("STOP", "stopped")):
            rows.append((f"their side is {word}", their_receiver if sends else their_sender, which))
            rows.append((f"our side is {word}", our_sender if sends else our_receiver, which))
        sides = None
        for name, scenario, which in rows:
            try:
                sides = sides or Sides(bench, pair)
                goes_on(sides)
                done, freed = scenario(sides, which)
                size = done * BLOCKS * sides.shape.bytes_per_peer_block()
                table.row(title, name, f"{REQUESTS}x{BLOCKS}", size, freed=freed)
            except (Wrong, KeyError) as wrong:
                table.row(title, name, f"{REQUESTS}x{BLOCKS}", result=f"BAD: {wrong!r}"[:400])
                bench.end()
                sides = None
        bench.end()
