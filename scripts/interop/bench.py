"""What the rows need: sides of pairs as processes, the sizes of their caches, and the table."""
import itertools, json, os, queue, signal, socket, subprocess, sys, threading, time, urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
START = 400  # seconds for a peer to import and to start, on a busy machine


class Wrong(Exception):
    """Something that a row shows as its failure."""


def call(url, command, body=None, timeout=300):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/{command}", data=data, method="GET" if body is None else "POST")
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.loads(answer.read())
    except Exception as error:
        text = error.read().decode(errors="replace") if hasattr(error, "read") else error
        raise Wrong(f"{command}: {text}") from None


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Process:
    """A side of a pair: its lines of JSON, and its control."""

    def __init__(self, name, command, log):
        self.name, self.lines, self.url = name, queue.Queue(), None
        log.write(f"\n== {name}: {' '.join(map(str, command))}\n")
        log.flush()
        self.process = subprocess.Popen([str(x) for x in command], stdout=subprocess.PIPE, stderr=log, text=True)

        def read():
            for line in self.process.stdout:
                log.write(f"{name}: {line}")
                log.flush()
                if line.startswith("{"):
                    self.lines.put(json.loads(line))
            self.lines.put(None)

        threading.Thread(target=read, daemon=True).start()

    def line(self, key, timeout=START):
        """The next line with this key."""
        end = time.monotonic() + timeout
        while True:
            try:
                line = self.lines.get(timeout=max(0, end - time.monotonic()))
            except queue.Empty:
                raise Wrong(f"{self.name} said no {key} in {timeout} s") from None
            if line is None:
                raise Wrong(f"{self.name} ended with status {self.process.wait()}")
            if "handshake_failed" in line:
                raise Wrong(line["handshake_failed"])
            if key in line:
                return line

    def up(self):
        """Waits until the side is up, and takes its control's address."""
        line = self.line("up")
        self.url = line.get("ctl") or self.line("ctl")["ctl"]
        return line

    def call(self, command, body=None, timeout=300):
        return call(self.url, command, body, timeout)

    def alive(self):
        return self.process.poll() is None

    def signal(self, which):
        if self.alive():
            self.process.send_signal(which)

    def end(self):
        if self.alive():
            self.signal(signal.SIGCONT)
            try:
                if self.url:
                    self.call("quit", {}, 2)
                self.process.wait(3)
            except (Wrong, subprocess.TimeoutExpired):
                self.process.kill()
        self.process.wait()


class Bench:
    """Starts sides, and ends all of them."""

    def __init__(self, options):
        self.options, self.open, self.lives = options, [], itertools.count()
        self.log = open(options.log, "w")

    def start(self, name, command):
        process = Process(name, command, self.log)
        self.open.append(process)
        return process

    def end(self, *some):
        for process in some or self.open:
            process.end()
        self.open = [process for process in self.open if process.alive()]

    def ours(self, role, shape, **more):
        # vLLM never shakes hands again with an engine that it knows: each life has its own name, as vLLM's engines have.
        more.setdefault("engine_id", f"ours-{os.getpid()}-{next(self.lives)}")
        command = [self.options.ours, "--role", role, "--dialect", shape.dialect, "--mode", shape.mode, *shape.our_sizes()]
        return self.start("ours", command + flags(more))

    def vllm(self, role, shape, **more):
        s = shape
        heads = s.heads if s.mla else s.heads // s.their_tp
        sizes = ["--layers", s.layers, "--heads", heads, "--hd", s.head_dim, "--nblocks", s.blocks, "--block", s.peer_block]
        return self.start("vllm", self.python("vllm_pair", shape) + ["--role", role, "--mode", s.mode, *sizes] + flags(more))

    def sglang(self, role, shape, **more):
        s = shape
        parts = 1 if s.mla else 2
        item = s.peer_block * s.heads * s.head_dim * 2
        sizes = ["--regions", parts * s.layers, "--item", item, "--slots", s.blocks, "--page-size", s.peer_block]
        return self.start("sglang", self.python("sglang_pair", shape) + ["--role", role, *sizes] + flags(more))

    def python(self, driver, shape):
        """The peer's driver, unchanged, with what the driver has no option for."""
        variant = (["--mla"] if shape.mla else []) + (["--tp", shape.their_tp] if shape.their_tp > 1 else [])
        return [sys.executable, "-u", os.path.join(HERE, "peer.py"), self.options.peers, driver, *variant, "--"]


def flags(more):
    """Options of a command line: a value of True is an option without a value, and None is no option."""
    given = [(f"--{key.replace('_', '-')}", value) for key, value in more.items() if value is not None]
    return list(itertools.chain.from_iterable([name] if value is True else [name, value] for name, value in given))


class Shape:
    """Sizes of the caches of a pair."""

    def __init__(self, dialect, mode="pull", **more):
        self.dialect, self.mode, self.name = dialect, mode, "TP 1"
        self.layers, self.blocks, self.block, self.peer_block = 4, 200, 16, 16
        self.heads, self.head_dim = (1, 128) if dialect == "vllm" else (8, 64)
        self.tp, self.their_tp, self.page_major, self.mla, self.chunks = 1, 1, False, False, 1
        # What the causes of a refusal must say, if a pair of this shape must be refused, and on which side.
        self.refused, self.refused_by = (), "us"
        self.__dict__.update(more)

    def our_sizes(self):
        sizes = dict(layers=self.layers, blocks=self.blocks, block=self.block, peer_block=self.peer_block, heads=self.heads,
                     head_dim=self.head_dim * 2 if self.mla and self.dialect == "vllm" else self.head_dim, tp=self.tp,
                     chunks=self.chunks, page_major=self.page_major or None, mla=self.mla or None,
                     dtype="bf16" if self.dialect == "vllm" else "f16")
        return flags(sizes)

    def bytes_per_peer_block(self):
        return self.layers * self.heads * self.peer_block * 2 * self.head_dim * 2 // (2 if self.mla and self.dialect == "sglang" else 1)

    def __str__(self):
        return self.name


PAIRS = {
    "sglang-to-ours": ("SGLang P → our D", "sglang", "push"),
    "ours-to-vllm": ("our P → vLLM D, pull", "vllm", "pull"),
    "vllm-to-ours": ("vLLM P → our D, pull", "vllm", "pull"),
    "ours-to-sglang": ("our P → SGLang D", "sglang", "push"),
    "vllm-to-ours-push": ("vLLM P → our D, push", "vllm", "push"),
    "ours-to-vllm-push": ("our P → vLLM D, push", "vllm", "push"),
}


class Table:
    """The rows so far. A row is printed when it is known."""
    COLUMNS = (("pair", 26), ("shape", 38), ("requests", 9), ("bytes verified", 15), ("handshake ms", 12), ("GB/s", 7), ("freed by the peer", 18), ("", 0))

    def __init__(self):
        self.failed = self.count = 0
        print("  ".join(title.ljust(width) for title, width in self.COLUMNS), flush=True)

    def row(self, pair, shape, requests="", verified="", handshake="", speed="", freed="", result="ok"):
        self.count += 1
        self.failed += result != "ok"
        cells = (pair, str(shape), requests, verified, handshake, speed, freed, result)
        print("  ".join(str(cell).ljust(width) for cell, (_, width) in zip(cells, self.COLUMNS)), flush=True)
