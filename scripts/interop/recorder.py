"""Records what a peer says, with everything that differs between two runs masked by its field."""
import json, struct, threading, time

import msgspec

# What takes the place of addresses: regions lie this far apart.
BASE, APART = 1 << 40, 1 << 32


class Recorder:
    """Writes each message that this process sends: the time, by which two files are joined, the side, the way, and the
    parts in hexadecimal."""

    def __init__(self, path, side):
        self.file, self.side, self.inside, self.lock = open(path, "w"), side, threading.local(), threading.Lock()

    def say(self, via, parts):
        parts = [part.encode() if isinstance(part, str) else bytes(part) for part in parts]
        parts = masked(via, parts)
        with self.lock:
            line = dict(time=time.monotonic(), by=self.side, via=via, parts=[part.hex() for part in parts])
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()

    def tell(self, via, value):
        """Writes JSON that a router carries."""
        with self.lock:
            self.file.write(json.dumps(dict(time=time.monotonic(), by="P", via=via, json=value)) + "\n")
            self.file.flush()

    def watch(self):
        """From now on, messages of all ZeroMQ sockets and notifications of all NIXL agents are recorded."""
        import nixl_cu12._api, zmq

        def sends(kind, name, parts_of):
            original = getattr(kind, name)

            def send(target, data, *more, **named):
                if getattr(self.inside, "on", False):
                    return original(target, data, *more, **named)
                parts = parts_of(data)
                # A ROUTER's messages begin with an envelope.
                self.say("zmq", parts[2:] if target.socket_type == zmq.ROUTER else parts)
                self.inside.on = True
                try:
                    return original(target, data, *more, **named)
                finally:
                    self.inside.on = False

            setattr(kind, name, send)

        sends(zmq.Socket, "send_multipart", list)
        sends(zmq.Socket, "send", lambda data: [data])
        agent = nixl_cu12._api.nixl_agent

        def notifies(name, place):
            original = getattr(agent, name)

            def call(target, *given, **named):
                text = named.get("notif_msg", given[place] if len(given) > place else b"")
                if text:
                    self.say("notification", [text])
                return original(target, *given, **named)

            setattr(agent, name, call)

        notifies("send_notif", 1)
        notifies("make_prepped_xfer", 5)
        notifies("initialize_xfer", 4)


def masked(via, parts):
    if via == "zmq" and len(parts) == 2 and parts[0][:1] == b"\x82":
        return [handshake(parts[0]), msgspec.msgpack.encode(0.0)]
    if via == "notification" and parts[0].startswith(b"PUSH_REG:"):
        fields = msgspec.msgpack.decode(parts[0][9:])
        fields.update(decode_port=5601, remote_port=5600)
        return [b"PUSH_REG:" + msgspec.msgpack.encode(fields)]
    if via == "zmq" and len(parts) > 4 and parts[0] == b"NixlMsgGuard":
        parts = list(parts)
        parts[3], parts[4] = b"5601", b"decode-agent"
        if parts[1] == b"None":
            parts[5] = b"metadata of decode-agent"
            parts[6], parts[7] = addresses(parts[6], BASE), addresses(parts[7], 2 * BASE)
    return parts


def handshake(payload):
    """vLLM's answer to a handshake, in which the agent's metadata and all addresses are masked."""
    outer = msgspec.msgpack.decode(payload)
    inner = msgspec.msgpack.decode(outer["agent_metadata_bytes"])
    # NIXL's metadata begin with the name of the agent.
    name = b"agent of " + inner["engine_id"].encode()
    inner["agent_metadata"] = b"nixlSerDes|Agent" + struct.pack("<Q", len(name)) + name
    inner["kv_caches_base_addr"] = [BASE + n * APART for n in range(len(inner["kv_caches_base_addr"]))]
    outer["agent_metadata_bytes"] = msgspec.msgpack.encode(inner)
    return msgspec.msgpack.encode(outer)


def addresses(packed, base):
    count = len(packed) // 8
    return struct.pack(f"<{count}Q", *(base + n * APART for n in range(count)))


def params(value):
    """kv_transfer_params, in which the port is masked."""
    return dict(value, remote_port=5600) if "remote_port" in value else value
