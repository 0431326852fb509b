"""Several tensor-parallel ranks of a vLLM engine in the process of a driver that knows one rank.

The engine has one scheduler and a real worker for each rank, as in vLLM, where each worker has a process of its own.
A request has been sent or received once every worker says so; it has failed once one worker says so.
"""
import collections, types


def several(space, size):
    """From now on, engines of the driver have `size` ranks. The driver's --heads are those of one rank."""
    space["load"] = loads(space["load"], size)
    space["fill_pattern"] = lambda engine, options: fill(space["ctl"], engine, options, size)
    space["check_pattern"] = lambda engine, source, target: check(space["ctl"], engine, source, target, size)


def loads(load, size):
    def wrapped(options):
        torch, base = load(options)
        # The driver's own imports must come first.
        import vllm.distributed.kv_transfer.kv_connector.v1.nixl as nixl

        base.get_tensor_model_parallel_world_size = lambda: size
        for mode in ("Pull", "Push"):
            worker, scheduler = f"Nixl{mode}ConnectorWorker", f"Nixl{mode}ConnectorScheduler"
            engine = []
            setattr(nixl, worker, workers_of(getattr(nixl, worker), base, size, engine))
            setattr(nixl, scheduler, scheduler_of(getattr(nixl, scheduler), engine))
        return torch, base

    return wrapped


def workers_of(kind, base, size, engine):
    class Workers:
        """All workers of an engine as one. What the driver only looks at is that of rank 0."""

        def __init__(self, *given):
            self.ranks, self.sent, self.received = engine, collections.Counter(), collections.Counter()
            for rank in range(size):
                base.get_tensor_model_parallel_rank = lambda rank=rank: rank
                self.ranks.append(kind(*given))

        def __getattr__(self, name):
            return getattr(self.ranks[0], name)

        def register_kv_caches(self, caches):
            whole = dict(caches)
            for number, worker in enumerate(self.ranks):
                own = {layer: cache if number == 0 else cache.clone() for layer, cache in whole.items()}
                worker.register_kv_caches(own)
                if number:
                    # The driver clears and compares all caches that it has.
                    caches.update({f"rank {number}, {layer}": cache for layer, cache in own.items()})

        def start_load_kv(self, metadata):
            for worker in self.ranks:
                worker.start_load_kv(metadata)

        def get_transfer_results(self):
            results = [worker.get_transfer_results() for worker in self.ranks]
            failed = set().union(*(result.failed_recving or () for result in results))
            sent = together(self.sent, [result.finished_sending for result in results], size)
            received = together(self.received, [result.finished_recving for result in results], size)
            return types.SimpleNamespace(finished_sending=sent, finished_recving=received, failed_recving=failed)

        def shutdown(self):
            for worker in self.ranks:
                worker.shutdown()

    return Workers


def together(counts, parts, size):
    """The requests that every rank has named by now."""
    for part in parts:
        counts.update(part or ())
    all_ranks = {request for request, count in counts.items() if count >= size}
    for request in all_ranks:
        del counts[request]
    return all_ranks


def scheduler_of(kind, engine):
    class Scheduler(kind):
        """A scheduler that shows the handshakes of all ranks."""

        def set_xfer_handshake_metadata(self, _):
            shown = {(0, rank): worker.xfer_handshake_metadata for rank, worker in enumerate(engine)}
            super().set_xfer_handshake_metadata(shown)

    return Scheduler


def parts(engine, ctl, blocks, size):
    """Each cache with its words by the rule. Heads are outermost in a block: each rank has one run of its words.
    Latents are on every rank whole."""
    import numpy as np

    layers = len(engine.kv) // size
    latent = engine.w.use_mla
    for number, cache in enumerate(engine.kv):
        rank, layer = divmod(number, layers)
        words = ctl.pattern(np, engine.block_bytes * (1 if latent else size), blocks, layer)
        own = engine.block_bytes // 4
        at = 0 if latent else rank * own
        yield engine.view(cache).numpy().view(np.uint32), words[:, at:at + own]


def fill(ctl, engine, options, size):
    for cache, words in parts(engine, ctl, range(options.nblocks), size):
        cache[:] = words


def check(ctl, engine, source, target, size):
    """Numbers of pairs of a cache and a block that differ."""
    return sum(int((cache[target] != words).any(1).sum()) for cache, words in parts(engine, ctl, source, size))
