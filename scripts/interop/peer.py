#!/usr/bin/env python3
"""Runs a driver of the peers, unchanged, in variants for which the driver has no option.

    peer.py DIR vllm_pair|sglang_pair [--mla] [--tp N] [--record FILE] -- OPTIONS OF THE DRIVER

--mla makes the model one with latent attention: vLLM's latents have twice the elements of --hd.
--tp gives a vLLM engine N tensor-parallel ranks, all in this process; --heads are those of one rank.
SGLang's driver has 64 rows of metadata, which are too few for 100 requests at once; it gets 256.
"""
import argparse, ast, os, sys, types

import ranks


def latent_vllm(fields):
    """The model's description says that it has latents, and its cache holds them."""
    import vllm.v1.kv_cache_interface as interface

    full = interface.FullAttentionSpec

    class Latent(interface.MLAAttentionSpec):
        def __init__(self, head_size, **more):
            super().__init__(head_size=2 * head_size, **more)

    if "__new__" not in full.__dict__:
        full.__new__ = lambda kind, *_, **__: object.__new__(Latent if kind is full else kind)
    size = fields["get_head_size"]
    fields.update(use_mla=True, get_head_size=lambda: 2 * size())


def latent_sglang(_):
    """The manager is told that the backend has latents."""
    import sglang.srt.disaggregation.nixl.conn as conn

    class Manager(conn.NixlKVManager):
        def __init__(self, args, mode, server, _):
            super().__init__(args, mode, server, True)

    conn.NixlKVManager = Manager


def all_heads(fields, ranks):
    """The model has the heads of all ranks."""
    of_one = fields["get_total_num_kv_heads"]
    fields.update(get_total_num_kv_heads=lambda: ranks * of_one())


def record(path, space):
    """Records what the driver's side says. Ids that the driver makes of its process are those of process 1."""
    import recorder

    role = sys.argv[sys.argv.index("--role") + 1]
    written = recorder.Recorder(path, role[0].upper())
    written.watch()
    system = types.ModuleType("os")
    system.__dict__.update(os.__dict__, getpid=lambda: 1)
    space["os"] = system
    call = space["ctl"].call

    def noted(url, *more, **named):
        answer = call(url, *more, **named)
        for value in answer.get("params", []):
            written.tell("params", recorder.params(value))
        return answer

    space["ctl"].call = noted


def main():
    own, theirs = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, theirs = own[:at], own[at + 1:]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers")
    parser.add_argument("driver", choices=["vllm_pair", "sglang_pair"])
    parser.add_argument("--mla", action="store_true")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--record", metavar="FILE", help="write what the driver's side says into this file")
    options = parser.parse_args(own)

    hooks = {"use_mla": latent_vllm, "enable_pd_role_switch": latent_sglang} if options.mla else {}
    if options.tp > 1:
        hooks["tensor_parallel_size"] = lambda fields: fields.update(tensor_parallel_size=options.tp)
        if not options.mla:
            hooks["get_total_num_kv_heads"] = lambda fields: all_heads(fields, options.tp)
    plain = types.SimpleNamespace

    class Namespace(plain):
        """The drivers describe their engines by namespaces; a hook changes the one with its field."""

        def __init__(self, **fields):
            for field, hook in hooks.items():
                if field in fields:
                    hook(fields)
            super().__init__(**fields)

    types.SimpleNamespace = Namespace
    path = os.path.join(options.peers, options.driver + ".py")
    sys.argv = [path, *theirs]
    with open(path) as file:
        tree = ast.parse(file.read(), path)
    # All definitions first, and then what a driver does when it is run.
    *definitions, run = tree.body
    space = {"__name__": "__main__", "__file__": path}
    exec(compile(ast.Module(definitions, []), path, "exec"), space)
    if "AUX_SLOTS" in space:
        space["AUX_SLOTS"] = 256
    if options.tp > 1:
        ranks.several(space, options.tp)
    if options.record:
        record(options.record, space)
    exec(compile(ast.Module([run], []), path, "exec"), space)


main()
