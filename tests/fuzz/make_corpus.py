"""Writes seeds of the binary formats: python3 tests/fuzz/make_corpus.py

The script shares no code with the library: a seed that the library accepts shows that both implement the same format.
Inputs found by fuzzing are next to the seeds under other names, and this script does not touch them. The seeds of
launcher_environment are text, written by hand.
"""

import hashlib
import hmac
import json
import pathlib
import struct

from network_seeds import net_address_seeds, net_blob_seeds, net_message_seeds

CORPUS = pathlib.Path(__file__).parent / "corpus"
CHALLENGE, HELLO, WELCOME, START, MESSAGE, PART, FAILURE, GIVE_UP = range(1, 9)


def header(frame_type: int, length: int, magic: bytes = b"FRY1", zero: int = 0) -> bytes:
    return magic + struct.pack("<HHI", frame_type, zero, length)


def hello(secret: bytes, root_nonce: bytes, version: bytes = b"1.2.3") -> bytes:
    unproven = bytes(range(32)) + b"I" * 16 + struct.pack("<II", 3, 8) + version.ljust(32, b"\0")
    label = b"ferry bootstrap peer proof".ljust(32, b"\0")
    return unproven + hmac.digest(secret, label + root_nonce + unproven, hashlib.sha256)


def failure(code: int, peer: int, text: bytes) -> bytes:
    return struct.pack("<Ii", code, peer) + text


def frame_seeds() -> dict[str, bytes]:
    seeds = {f"header_{frame_type}": header(frame_type, length) for frame_type, length in HEADERS.items()}
    return seeds | {
        "header_too_long": header(MESSAGE, (1 << 20) + 1),
        "header_reserved_used": header(START, 0, zero=1),
        "header_other_protocol": b"GET / HTTP/1.1\r\n\r\n",
        "hello": hello(b"secret", bytes(32)),
        "hello_longest_version": hello(b"secret", bytes(32), b"1.2.3-a-suffix-up-to-the-last-by"),
        "hello_unpadded": hello(b"secret", bytes(32), b"1.2.3\0x"),
        "failure": failure(5, 7, b"rank 7 left"),
        "failure_no_rank": failure(9, -1, b""),
        "failure_clipped": failure(8, 2, b"x" * 1030),
        "failure_no_code": failure(10, 0, b"?"),
    }


HEADERS = {CHALLENGE: 32, HELLO: 120, WELCOME: 0, START: 0, MESSAGE: 1 << 20, PART: 5, FAILURE: 1032, GIVE_UP: 8}


def handshake_story(secret: bytes, version: bytes, changes: bytes) -> bytes:
    fields = bytes(range(32)) + bytes(range(32, 64)) + b"I" * 16 + struct.pack("<II", 3, 8)
    return bytes([len(secret)]) + secret + fields + bytes([len(version)]) + version + changes


def handshake_seeds() -> dict[str, bytes]:
    proven = header(HELLO, 120) + hello(b"secret", bytes(32))
    return {
        "challenge": header(CHALLENGE, 32) + bytes(range(32)),
        "hello_proven": proven,
        "hello_by_another_secret": header(HELLO, 120) + hello(b"secreT", bytes(32)),
        "hello_as_welcome": header(WELCOME, 0) + proven[12:],
        "changes": handshake_story(b"secret", b"1.2.3", bytes([0, 44, 1, 0, 3, 128, 0, 2, 32])),
        "change_in_proof": handshake_story(b"s" * 100, b"0.1", bytes([1, 131, 1, 130, 255])),
        "version_too_long": handshake_story(b"secret", b"v" * 40, b""),
        "version_with_zero": handshake_story(b"secret", b"1\x002", b""),
        "no_secret": handshake_story(b"", b"1.2.3", bytes([0, 12, 1])),
    }


# Events of bootstrap_channel_fuzz.cpp.
FRAME, LONG_FRAME, FORGED_HEADER, REPEAT, STRANGE_BYTES, DROP, SWAP = range(7)


def frame_event(frame_type: int, payload: bytes) -> bytes:
    return bytes([FRAME, frame_type, len(payload)]) + payload


def channel_seeds() -> dict[str, bytes]:
    def story(*events: bytes, chunk: int = 0) -> bytes:
        return struct.pack("<H", chunk) + b"".join(events)

    one, two, three = (frame_event(MESSAGE, text) for text in (b"one", b"", b"three"))
    long = struct.pack("<BHB", LONG_FRAME, 35000, 7)
    change_byte_3 = struct.pack("<HBH", 3, 128, 0)
    # The end of the connection is read after sixteen events; this event has no effect and fills the sixteen.
    rest = bytes([STRANGE_BYTES, 0])
    return {
        "frames_at_once": story(one, two, three, chunk=0xFFFF),
        "frames_byte_by_byte": story(one, two, three, chunk=1),
        "session": story(
            frame_event(WELCOME, b""),
            frame_event(START, b""),
            frame_event(PART, b"part"),
            frame_event(FAILURE, failure(5, 7, b"rank 7 left")),
            frame_event(GIVE_UP, struct.pack("<Q", 1)),
            chunk=100,
        ),
        "long_frames": story(long, one, long, chunk=9000),
        "long_frames_at_once": story(long, one, chunk=0xFFFF),
        "announces_too_much": story(one, bytes([FORGED_HEADER]) + header(MESSAGE, 0xFFFFFFFF) + b"\0", chunk=9),
        "announces_a_mebibyte": story(bytes([FORGED_HEADER]) + header(MESSAGE, 1 << 20) + b"\4abcd", long, chunk=999),
        "announces_too_little": story(bytes([FORGED_HEADER]) + header(MESSAGE, 2) + b"\4abcd", one, chunk=999),
        "impossible_type": story(one, frame_event(9, b""), two, chunk=50),
        "repeated": story(one, bytes([REPEAT, 0]), two, chunk=999),
        "dropped": story(one, two, bytes([DROP]), three, chunk=999),
        "swapped": story(one, two, bytes([SWAP]), three, chunk=999),
        "not_a_rank": story(bytes([STRANGE_BYTES, 18]) + b"GET / HTTP/1.1\r\n\r\n", chunk=4),
        "changed_magic": story(one, *[rest] * 15, change_byte_3, chunk=20),
        "cut": story(one, two, *[rest] * 14, struct.pack("<HBH", 0, 0, 5), chunk=20),
    }


def forward_table(items: list[tuple[int, list[tuple[int, int, int]]]], *, tokens: int = 9, topk: int = 4) -> bytes:
    """Items are (token, destinations), destinations are (row, rank of the node, entry)."""
    destinations = [destination for _, item in items for destination in item]
    first_destination = [sum(len(item) for _, item in items[:count]) for count in range(len(items) + 1)]
    table = b"".join(struct.pack("<i", token) for token, _ in items)
    table += b"".join(struct.pack("<i", first) for first in first_destination)
    table += b"".join(struct.pack("<ihBB", row, rank, entry, 0) for row, rank, entry in destinations)
    table += bytes(-len(table) % 16)
    return bytes([len(items), len(destinations), tokens, topk, 5, 6, 7]) + table


def forward_table_seeds() -> dict[str, bytes]:
    good = [(0, [(0, 0, 1), (0, 0, 3), (5, 1, 0)]), (4, [(6, 2, 2)]), (8, [(4, 0, 0), (3, 1, 1)])]
    return {
        "empty": forward_table([]),
        "good": forward_table(good),
        "cut": forward_table(good)[:-16],
        "tokens_descend": forward_table([good[1], good[0]]),
        "no_such_token": forward_table(good, tokens=8),
        "item_without_destinations": forward_table([(0, [(0, 0, 1)]), (4, [])]),
        "no_such_rank": forward_table([(0, [(0, 3, 1)])]),
        "no_such_row": forward_table([(0, [(5, 0, 1)])]),
        "negative_row": forward_table([(0, [(-1, 0, 1)])]),
        "no_such_entry": forward_table([(0, [(0, 0, 4)])]),
        "destinations_descend": forward_table([(0, [(1, 0, 1), (0, 0, 2)])]),
        "a_destination_twice": forward_table([(0, [(1, 0, 1), (1, 0, 1)])]),
    }


ROUTE, DISPATCH, COMBINE, LATENCY_DISPATCH, LATENCY_COMBINE, DESTROY = range(6)
NUM_FIELDS = 14


def call_header(
    operation: int = ROUTE,
    *,
    code: int = 0,
    text: bytes = b"",
    text_bytes: int | None = None,
    fields: tuple[int, ...] = (),
    call: int = 7,
    rows: int = 0,
    entries: int = 0,
) -> bytes:
    length = len(text) if text_bytes is None else text_bytes
    values = fields + (0,) * (NUM_FIELDS - len(fields))
    record = struct.pack("<iiii", operation, code, 0, length) + struct.pack(f"<{NUM_FIELDS}q", *values)
    return struct.pack("<Q", call) + record + text.ljust(640, b"\0") + struct.pack("<qq", rows, entries)


def error_record(code: int, culprit: int, text: bytes, text_bytes: int | None = None) -> bytes:
    return struct.pack("<iii", code, culprit, len(text) if text_bytes is None else text_bytes) + text.ljust(512, b"\0")


def call_header_seeds() -> dict[str, bytes]:
    def story(*headers: bytes, end: bytes = b"") -> bytes:
        # A reader returns zeros past the end of an input.
        return (bytes([7, len(headers) - 1]) + b"".join(headers) + end).rstrip(b"\0")

    def placed(owners: tuple[int, ...], placement: int, **more: int) -> bytes:
        fields = (8, len(owners), 0, 0, 0, 0, 1, 0, 0, 1, placement)
        return call_header(fields=fields, text=struct.pack(f"<{len(owners)}h", *owners), **more)

    def placed_many(experts: int, hashes: tuple[int, ...]) -> bytes:
        return call_header(
            fields=(8, experts, 0, 0, 0, 0, 1, 0, 0, 1, hashes[0]), text=struct.pack(f"<{len(hashes)}I", *hashes)
        )

    def homes(form: int, values: tuple[int, ...], placement: int, *, physical: int = 4, kind: str = "h") -> bytes:
        fields = (8, 3, physical, 0, 0, 0, 1, 0, 0, 1, placement)
        text = struct.pack("<hh", form, 2) + struct.pack(f"<{len(values)}{kind}", *values)
        return call_header(fields=fields, text=text)

    def latency(owners: tuple[int, ...], placement: int) -> bytes:
        fields = (8, len(owners), 0, 0, 0, 128, 256, 1, 4096, 5, 1, 32, 0, placement)
        return call_header(LATENCY_DISPATCH, fields=fields, text=struct.pack(f"<{len(owners)}h", *owners), entries=80)

    route = call_header(fields=(8, 64, 0, 0, 0, 0, 1, 0, 0, 1, 12345), rows=1000, entries=80)
    return {
        "agreed": story(route, route),
        "dispatch": story(call_header(DISPATCH, fields=(0, 4096, 5, 0, 0, 0, 1, 1)), end=error_record(4, 0, b"late")),
        "combine": story(call_header(COMBINE, fields=(0, 4096, 5, 1, 0))),
        "latency_dispatch": story(latency((0, 0, 1, 1), 7), latency((0, 0, 1, 1), 7)),
        "latency_dispatch_other_placement": story(latency((0, 0, 1, 1), 7), latency((0, 1, 0, 1), 8)),
        "latency_combine": story(call_header(LATENCY_COMBINE, fields=(3, 4096, 5, 1, 0)), route),
        "destroy": story(call_header(DESTROY), call_header(DESTROY)),
        "other_field": story(route, call_header(fields=(8, 65, 0, 0, 0, 0, 1, 0, 0, 1, 12345), entries=80)),
        "other_placement": story(placed((0, 0, 1, 1), 7), placed((0, 1, 0, 1), 8)),
        "other_placement_of_many": story(placed_many(640, (1,) * 160), placed_many(640, (2,) + (1,) * 159)),
        "other_placement_cut": story(placed((0, 0, 1, 1), 7), placed((0, 1, 0, 1), 8, text_bytes=7)),
        "other_placement_of_absurdly_many": story(
            call_header(fields=(8, (1 << 63) - 1, 0, 0, 0, 0, 1, 0, 0, 1, 7), text=b"1" * 640),
            call_header(fields=(8, (1 << 63) - 1, 0, 0, 0, 0, 1, 0, 0, 1, 8), text=b"2" * 640),
        ),
        "other_homes": story(homes(0, (0, 1, 2, 0), 7), homes(0, (0, 1, 2, 1), 8)),
        "other_homes_on_other_ranks": story(homes(0, (0, 1, 2, 0), 7), homes(1, (0, 1, 2, 0, 0, 1, 0, 1), 8)),
        "other_homes_of_many": story(
            homes(2, (1,) * 159, 7, physical=640, kind="I"), homes(2, (1,) * 158 + (2,), 8, physical=640, kind="I")
        ),
        "other_homes_of_a_form_that_is_none": story(homes(9, (0, 1), 7), homes(-3, (0,), 8)),
        "other_homes_of_absurdly_many": story(
            homes(2, (1,), 7, physical=(1 << 63) - 1), homes(2, (2,), 8, physical=(1 << 63) - 1)
        ),
        "other_operation": story(call_header(COMBINE), call_header(DESTROY)),
        "own_error": story(route, call_header(code=3, text=b"route: too much")),
        "own_error_unreadable": story(call_header(code=1, text=b"\x1b[2J\xff\0" * 9)),
        "other_call": story(call_header(call=8)),
        "no_such_operation": story(call_header(DESTROY + 1)),
        "negative_operation": story(call_header(-1)),
        "no_such_code": story(call_header(code=10, text=b"?")),
        "negative_code": story(call_header(code=-1, text=b"?")),
        "text_too_long": story(call_header(code=1, text=b"x" * 640, text_bytes=641)),
        "text_of_negative_length": story(call_header(code=1, text=b"x", text_bytes=-1)),
        "too_many_rows": story(call_header(rows=1 << 31)),
        "negative_rows": story(call_header(rows=-1)),
        "too_many_entries": story(call_header(entries=1 << 31)),
        "negative_entries": story(call_header(entries=-8)),
        "error_record_of_success": story(route, end=error_record(0, 0, b"all is well")),
        "error_record_no_such_code": story(route, end=error_record(10, 0, b"?")),
        "error_record_without_culprit": story(route, end=error_record(6, -1, b"")),
        "error_record_no_such_culprit": story(route, end=error_record(6, 1, b"rank 1")),
        "error_record_too_long": story(route, end=error_record(5, 0, b"x" * 512, 1 << 30)),
        "error_record_unreadable": story(route, end=error_record(5, 0, b"\0\x7f\xff", 3)),
    }


# Kinds of headers in rail_chunk_fuzz.cpp, and the fields that a changed one may differ in.
GOOD, CHANGED, ANY = range(3)
CHUNK_IDX, EXCHANGE_IDX, NUM_ITEMS, ITEM_BYTES = range(4)


def rail_chunk_seeds() -> dict[str, bytes]:
    """Chunks have room for four units of 16 bytes; an item has two, so a chunk holds two items."""
    scribble = b"\xff" * 24

    def story(*events: bytes) -> bytes:
        return bytes([3]) + b"".join(events)

    def exchange(items: int, granules: int = 2) -> bytes:
        return bytes([items, granules - 1])

    def good(fewer: int = 0, *, used: bytes = b"\0") -> bytes:
        return bytes([GOOD, fewer]) + scribble + used

    def changed(field: int, change: int) -> bytes:
        return bytes([CHANGED, 0, field]) + struct.pack("<Q", change)

    def given(chunk_idx: int, exchange_idx: int, num_items: int, item_bytes: int) -> bytes:
        return bytes([ANY]) + struct.pack("<QQII", chunk_idx, exchange_idx, num_items, item_bytes)

    return {
        "two_exchanges": story(exchange(3), good(), good(), exchange(4, 1), good()),
        "item_by_item": story(exchange(8, 1), good(used=b"\3\2\1\0"), good(used=b"\1\1\0")),
        "short_chunks": story(exchange(3), good(1), good(1), good(0)),
        "an_empty_exchange": story(exchange(0), exchange(1), good()),
        "as_it_should_be": story(exchange(2), given(0, 1, 2, 32) + scribble),
        "number_of_another": story(exchange(3), changed(CHUNK_IDX, 1), good(), changed(CHUNK_IDX, 1 << 63), good()),
        "of_another_exchange": story(exchange(3), changed(EXCHANGE_IDX, 1), good(), good()),
        "no_items": story(exchange(3), given(0, 1, 0, 32), good()),
        "too_many_items": story(exchange(3), given(0, 1, 3, 32), good(), given(1, 1, 2, 32), good()),
        "most_items": story(exchange(3), changed(NUM_ITEMS, 0xFFFFFFFD), given(0, 1, 0xFFFFFFFF, 32), good()),
        "shorter_items": story(exchange(3), changed(ITEM_BYTES, 0xFFFFFFF0), good()),
        "longest_items": story(exchange(3), given(0, 1, 2, 0xFFFFFFFF), given(0, 1, 0x8000000, 32), good()),
        "refused_again_and_again": story(exchange(3), *[given(9, 9, 9, 9)] * 8),
    }


# Layouts and changes of route_tables_fuzz.cpp.
TOKENS, EXPERTS, SLAB = range(3)
RANK_COUNT, EXPERT_COUNT, TABLE_ITEMS, TABLE_DESTINATIONS, ENTRIES, TABLE_WORD = range(6)


def route_tables_seeds() -> dict[str, bytes]:
    """Node 1 of 2 with two ranks each reads; six experts, one or two on a rank; two entries a token."""

    def story(layout: int, *changes: tuple[int, int, int, int], space: int = 15) -> bytes:
        shape = bytes([1, 1, 1, 5, layout, space, 0])
        # Experts of each token, plus one.
        ranks = [[(4, 1), (3, 4)], [(4, 4)], [(0, 0), (1, 2), (4, 3)], [(3, 0)]]
        tokens = b"".join(bytes([len(rank)]) + b"".join(map(bytes, rank)) for rank in ranks)
        edits = b"".join(struct.pack("<BBBi", *change) for change in changes)
        return shape + tokens + bytes([len(changes)]) + edits

    return {
        "tokens": story(TOKENS),
        "experts": story(EXPERTS),
        "experts_unaligned": story(EXPERTS, space=0),
        "slab": story(SLAB),
        "slab_full": story(SLAB, space=0),
        "count_too_large": story(TOKENS, (0, RANK_COUNT, 2, 1 << 30)),
        "count_negative": story(EXPERTS, (0, EXPERT_COUNT, 3, -2)),
        "one_row_more_than_in_the_table": story(TOKENS, (0, RANK_COUNT, 2, 1), (2, RANK_COUNT, 2, 1)),
        "one_row_less_than_in_the_table": story(TOKENS, (0, RANK_COUNT, 2, -1)),
        "table_of_no_items": story(TOKENS, (1, TABLE_ITEMS, 1, -1), (1, TABLE_DESTINATIONS, 1, -2)),
        "too_many_destinations": story(TOKENS, (2, TABLE_DESTINATIONS, 1, 7)),
        "entries_of_no_token": story(TOKENS, (3, ENTRIES, 0, 1)),
        "padding_taken": story(EXPERTS, (1, TABLE_WORD, 3, 1)),
        "row_of_another": story(TOKENS, (1, TABLE_WORD, 3, 1)),
        "row_of_a_rank_that_gets_none": story(
            TOKENS,
            (1, TABLE_WORD, 3, -2),
            (1, TABLE_WORD, 4, -1),
            (1, TABLE_WORD, 5, -2),
            (1, TABLE_WORD, 6, -1),
        ),
        "token_that_does_not_exist": story(SLAB, (1, TABLE_WORD, 0, 1)),
    }


def tuning_seeds() -> dict[str, bytes]:
    def entry(**changes: object) -> dict[str, object]:
        whole = {"operation": "dispatch", "layout": "tokens", "staged": False, "min_tokens": 33, "max_tokens": 128}
        whole |= {"min_row_bytes": 1024, "max_row_bytes": 2048}
        return whole | {"num_sms": 10, "num_copy_sms": 2, "chunk_tokens": 512} | changes

    def table(*entries: object, **changes: object) -> dict[str, object]:
        return {"gpu": "H200", "driver": "580.1", "num_ranks": 8, "entries": list(entries)} | changes

    def file(*tables: object, **changes: object) -> bytes:
        return json.dumps({"ferry_tuning": 2, "tables": list(tables)} | changes, indent=1).encode()

    next_rows = entry(min_row_bytes=2049, max_row_bytes=4096, default_time_us=20.5, time_us=19)
    return {
        "good": file(
            table(entry(), next_rows, entry(operation="combine"), entry(staged=True), entry(layout="slab")),
            table(num_ranks=4),
        ),
        "nodes": file(table(entry()), table(entry(operation="combine", num_copy_sms=0, staged=True), num_nodes=4)),
        "too_few_for_the_nodes": file(table(entry(num_sms=6), num_nodes=4)),
        "latency": file(
            table(entry(operation="latency_dispatch", layout="slab", num_copy_sms=0, chunk_tokens=0)),
            table(entry(operation="latency_combine", layout="slab", num_copy_sms=0), num_nodes=2, network="tcp"),
        ),
        "latency_into_tokens": file(table(entry(operation="latency_combine"))),
        "no_tables": file(),
        "overlapping_rows": file(table(entry(), entry(min_row_bytes=2048, max_row_bytes=4096))),
        "same_table_twice": file(table(), table()),
        "another_version": file(ferry_tuning=1),
        "unknown_member": file(table(entry(num_sm=3))),
        "unknown_operation": file(table(entry(operation="route"))),
        "negative": file(table(entry(num_sms=-1))),
        "too_large": file(table(entry(chunk_tokens=1 << 64))),
        "unknown_layout": file(table(entry(layout="rows"))),
        "tokens_backwards": file(table(entry(max_tokens=32))),
        "more_tokens": file(table(entry(), entry(min_tokens=129, max_tokens=512))),
        "rows_backwards": file(table(entry(max_row_bytes=1023))),
        "fraction": file(table(entry(num_sms=1.5))),
        "not_objects": file(1, [2], "three"),
        "cut": file(table(entry()))[:-20],
        "deep": b"[" * 2000,
        "number_beyond_doubles": b'{"ferry_tuning": 1e999}',
        "not_utf8": b'{"ferry_tuning": 2, "tables": [{"gpu": "\xff"}]}',
        "escapes": b'{"\\u0000\\n\\ud83d\\ude00": 1}',
    }


def main() -> None:
    targets = {
        "bootstrap_frame": frame_seeds(),
        "bootstrap_handshake": handshake_seeds(),
        "bootstrap_channel": channel_seeds(),
        "forward_table": forward_table_seeds(),
        "call_header": call_header_seeds(),
        "net_address": net_address_seeds(),
        "net_blob": net_blob_seeds(),
        "net_message": net_message_seeds(),
        "rail_chunk": rail_chunk_seeds(),
        "route_tables": route_tables_seeds(),
        "tuning": tuning_seeds(),
    }
    for target, seeds in targets.items():
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, seed in seeds.items():
            (folder / name).write_bytes(seed)


if __name__ == "__main__":
    main()
