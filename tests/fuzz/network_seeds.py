"""Seeds of data that networks carry: addresses, published memory, messages. For make_corpus.py."""

import struct


def fnv(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


def net_blob(body: bytes, *, memory: int = 4096, peer: int = 2) -> bytes:
    """End 1 of 3, with 5 channels, reads a blob that `peer` published; no byte is changed."""
    return struct.pack("<BBBBHHB", 1, 2, 5, peer, memory, 0, 0) + body


def net_blob_seeds() -> dict[str, bytes]:
    def body(own_part: bytes, name: bytes = b"ucx", memory: int = 4096, numbers: tuple[int, ...] = (2, 3, 5)) -> bytes:
        return name.ljust(16, b"\0") + struct.pack("<QIII", memory, *numbers) + own_part

    def whole(body: bytes) -> bytes:
        return b"FNB1" + struct.pack("<Q", fnv(body)) + body

    own_part = bytes(range(16)) + struct.pack("<QI", 1 << 40, 7) + b"address" + struct.pack("<I", 3) + b"key"
    good = whole(body(own_part))
    return {
        "good": net_blob(good),
        "good_body": net_blob(body(own_part)),
        "own_part": net_blob(own_part),
        "own_part_empty": net_blob(whole(body(b""))),
        "own_part_announces_too_much": net_blob(body(own_part[:-7] + struct.pack("<I", 0xFFFFFFFF) + b"key")),
        "own_part_longer": net_blob(body(own_part + b"?")),
        "one_byte_changed": struct.pack("<BBBBHHB", 1, 2, 5, 2, 4096, 40, 128) + own_part,
        "cut": net_blob(good[:-1]),
        "cut_in_the_numbers": net_blob(whole(body(b"")[:-1])),
        "no_magic": net_blob(b"GET /" + good),
        "garbled": net_blob(good[:-1] + b"?"),
        "other_engine": net_blob(whole(body(own_part, name=b"loopback"))),
        "engine_without_end": net_blob(whole(body(own_part, name=b"ucx\x1b[31m" + b"x" * 20))),
        "other_memory": net_blob(good, memory=4097),
        "other_end": net_blob(good, peer=0),
        "other_number_of_ends": net_blob(whole(body(own_part, numbers=(2, 4, 5)))),
        "other_channels": net_blob(whole(body(own_part, numbers=(2, 3, 4)))),
    }


def net_message_seeds() -> dict[str, bytes]:
    hello, notify, put, goodbye, farewell, socket, settled = 1, 2, 3, 4, 5, 6, 7

    atomic_add, atomic_swap, get, flush, answer, put_set, put_add = 9, 10, 11, 12, 13, 14, 15
    atomic_and, atomic_xor, narrow_set, narrow_swap, narrow_or, unknown = 17, 19, 20, 22, 24, 26

    def fields(
        kind: int, sequence: int, *, value: int, asked: tuple[int, int], announced: int, sender: int, channel: int
    ) -> bytes:
        return struct.pack("<BBBBHBBB", kind, sender, channel, sequence, value, *asked, announced)

    def sealed(
        kind: int,
        sequence: int,
        payload: bytes = b"",
        *,
        value: int = 0,
        asked: tuple[int, int] = (0, 0),
        announced: int | None = None,
        sender: int = 1,
        channel: int = 0,
        change: tuple[int, int] | None = None,
    ) -> bytes:
        length = len(payload) if announced is None else announced
        mode = b"\1" if change is None else b"\2"
        changed = b"" if change is None else bytes(change)
        numbers = fields(kind, sequence, value=value, asked=asked, announced=length, sender=sender, channel=channel)
        return mode + numbers + changed + bytes([len(payload)]) + payload

    def forged(payload: bytes = b"") -> bytes:
        header = struct.pack("<4sIIIQQQ", b"FNBM", put, 1, 0, 0, 0, len(payload)) + bytes(24 + 16)
        return b"\0" + header + bytes([len(payload)]) + payload

    memory = bytes([64])
    data = bytes(range(1, 17))
    return {
        "in_order": memory + sealed(hello, 0) + sealed(put, 1, data, value=48) + sealed(notify, 2, value=9, channel=2),
        "out_of_order": memory + sealed(notify, 2) + sealed(put, 1, data) + sealed(hello, 0) + sealed(notify, 3),
        "goodbye": memory + sealed(hello, 0) + sealed(goodbye, 1) + sealed(farewell, 2),
        "settled": memory + sealed(hello, 0) + sealed(socket, 1, value=77) + sealed(settled, 2),
        "twice": memory + sealed(put, 0, data) + sealed(put, 0, data[::-1]) + sealed(notify, 2) + sealed(notify, 2),
        "forged": memory + forged(data) + sealed(hello, 0),
        "changed_offset": memory + sealed(put, 0, data, change=(24, 8)) + sealed(put, 0, data),
        "changed_tag": memory + sealed(notify, 0, change=(79, 1)),
        "no_magic": memory + sealed(notify, 0, change=(0, 255)),
        "atomics": memory
        + sealed(atomic_add, 0, value=56, asked=(3, 1))
        + sealed(atomic_swap, 1, value=8)
        + sealed(flush, 2, asked=(4, 0)),
        "atomics_on_bits": memory + sealed(atomic_and, 0, value=8, asked=(3, 7)) + sealed(atomic_xor, 1, value=56),
        "narrow_atomics": memory
        + sealed(narrow_set, 0, value=60, asked=(3, 1))
        + sealed(narrow_or, 2, value=4, asked=(0, 9))
        + sealed(narrow_swap, 1, value=12, asked=(7, 2)),
        "narrow_atomic_misaligned": memory + sealed(narrow_or, 0, value=6),
        "narrow_atomic_beyond_the_end": memory + sealed(narrow_set, 0, value=64),
        "narrow_atomic_of_a_wide_value": memory + sealed(narrow_set, 0, value=4, asked=(3, 0xF1)),
        "narrow_atomic_with_a_wide_comparison": memory + sealed(narrow_swap, 0, value=4, asked=(0xF1, 3)),
        "unknown_kind": memory + sealed(unknown, 0),
        "puts_with_atomics": memory
        + sealed(put_add, 1, data, value=48, asked=(56, 1))
        + sealed(put_set, 0, data, value=0, asked=(32, 7)),
        "put_with_atomic_beyond_the_end": memory + sealed(put_add, 0, data, value=0, asked=(64, 1)),
        "put_beyond_the_end_with_atomic": memory + sealed(put_set, 0, data, value=49, asked=(0, 1)),
        "put_of_nothing_with_atomic": memory + sealed(put_set, 0),
        "misaligned_atomic": memory + sealed(atomic_add, 0, value=12),
        "atomic_beyond_the_end": memory + sealed(atomic_add, 0, value=64),
        "atomic_beyond_all_addresses": memory + sealed(atomic_swap, 0, value=0x8007),
        "get": memory + sealed(get, 0, value=60, asked=(1, 4)) + sealed(get, 1, value=60, asked=(1, 5)),
        "answers": memory
        + sealed(answer, 1, data[:4], asked=(5, 16))
        + sealed(answer, 0, data, asked=(5, 0))
        + sealed(answer, 2, data, asked=(5, 8)),
        "answer_beyond_the_end": memory + sealed(answer, 0, data, asked=(5, 5)),
        "answer_to_nothing": memory + sealed(answer, 0, data, asked=(6, 200)) + sealed(answer, 1, asked=(9, 0)),
        "answer_without_bytes": memory + sealed(answer, 0, asked=(5, 0)) + sealed(answer, 1, data, asked=(5, 0)),
        "beyond_the_end": memory + sealed(put, 0, data, value=49),
        "beyond_all_addresses": memory + sealed(put, 0, data, value=0x8007),
        "shorter_than_announced": memory + sealed(put, 0, data, announced=20),
        "empty_put": memory + sealed(put, 0),
        "notify_with_payload": memory + sealed(notify, 0, data),
        "other_sender": memory + sealed(notify, 0, sender=2),
        "other_channel": memory + sealed(notify, 0, channel=3),
        "other_kind": memory + sealed(8, 0),
        "no_memory": b"\0" + sealed(put, 0, data) + sealed(notify, 1),
    }


def net_address_seeds() -> dict[str, bytes]:
    def address(*parts: bytes, read_back: int = 0) -> bytes:
        body = bytes(range(16)) + bytes(range(32)) + struct.pack("<QQQI", 1 << 40, 1 << 41, 1 << 20, read_back)
        return body + b"".join(struct.pack("<I", len(part)) + part for part in parts)

    near = (b"host", b"key", b"", b"receiver")
    far = (b"network address", b"network key", b"key to GPU memory", b"receiver over the network")
    good = address(*near, *far)
    return {
        "good": good,
        "one_scope": address(b"", b"", b"", b"", b"network", b"key", b"", b""),
        "without_memory": address(b"host", b"", b"", b"", b"", b"", b"", b""),
        "reads_back": address(*near, *far, read_back=1),
        "reads_back_twice": address(*near, *far, read_back=2),
        "cut": good[:-1],
        "longer": good + b"?",
        "announces_too_much": good[:76] + struct.pack("<I", 0xFFFFFFFF) + good[80:],
    }
