"""Writes the seed corpus of wire_fuzzer.cpp: ``python tests/fuzz/seeds.py``, after a change of the wire format.

The layouts are in ``wire/header.h`` and ``wire/body.h``. The corpus test in ``tests/cpp`` fails if these seeds have
another wire version.
"""

from __future__ import annotations

import struct
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"

VERSION = 5
REQUEST, RESPONSE, CANCEL, GOODBYE, ARRIVE, RELEASE, JOIN, LEAVE, ACKNOWLEDGE = range(1, 10)
NOWHERE = 0xFFFFFFFF
UNDEFINED, STRIDED, COO, CSR = 0, 1, 2, 3
PER_TENSOR, PER_CHANNEL = 7, 8


def header(
    kind: int,
    call: int = 1,
    index: int = NOWHERE,
    spans: int = 0,
    version: int = VERSION,
    sequence: int = 0,
    place: tuple[int, int] = (0, 0),  # offset and bytes of the span
    deadline: int = 0,  # milliseconds
) -> bytes:
    fields = (0x5855, version, kind, 1, 11, 12, call, index, spans, sequence, *place, deadline, 0)
    return struct.pack("<HBBIQQQIIQQQII", *fields) + bytes(16)


def span(kind: int, size: int, **fields: int) -> bytes:
    """Return the announcement of a span that consists of one piece."""
    return rendezvous(header(kind, **{"index": 0, **fields}, place=(0, size)), size)


def eager(head: bytes, data: bytes = b"") -> bytes:
    return b"\x00" + head + struct.pack("<H", len(data)) + data


def rendezvous(head: bytes, size: int) -> bytes:
    return b"\x01" + head + struct.pack("<Q", size)


def other_length(head: bytes) -> bytes:
    return b"\x02" + bytes([len(head)]) + head


def alone(body: bytes, *span_sizes: int) -> bytes:
    return b"\x03" + bytes([len(span_sizes)]) + struct.pack(f"<{len(span_sizes)}QH", *span_sizes, len(body)) + body


def cancel(kind: int, call: int = 1) -> bytes:
    return b"\x04" + struct.pack("<QBQ", 11, kind, call)


def number(*values: int) -> bytes:
    return b"".join(b"\x05" + struct.pack("<Q", value) for value in values)


def storage(size: int, span: int = NOWHERE) -> bytes:
    return struct.pack("<QIbbH", size, span, 0, -1, 0)


def tensor(
    layout: int, sizes: tuple[int, ...], strides: tuple[int, ...] = (), stored: int = NOWHERE, children: int = 0
) -> bytes:
    record = struct.pack("<BBBBIIIqqdq", layout, 6, 4, 0, len(sizes), stored, children, 0, 0, 0.5, 3)
    return record + struct.pack(f"<{len(sizes) + len(strides)}q", *sizes, *strides)


def body(
    tensors: list[bytes] = [],  # noqa: B006 - never changed
    storages: list[bytes] = [],  # noqa: B006
    payload: bytes | int = b"payload",
    top: int | None = None,
    inline: bytes = b"",
) -> bytes:
    """Return a body. `payload` is its bytes, or the number of its bytes in span 0."""
    size, span, text = (len(payload), NOWHERE, payload) if isinstance(payload, bytes) else (payload, 0, b"")
    count = len(tensors) if top is None else top
    prefix = struct.pack("<IIIIQII", 2, count, len(tensors), len(storages), size, span, 0)
    return prefix + b"".join(storages) + b"".join(tensors) + text + inline


STRIDED_2X3 = tensor(STRIDED, (2, 3), (3, 1), 0)
INLINE = body([STRIDED_2X3], [storage(24)], inline=bytes(24))
SPARSE = body(
    [
        tensor(COO, (4, 4), children=2),
        tensor(STRIDED, (2, 1), (1, 1), 0),
        tensor(STRIDED, (1,), (1,), 1),
    ],
    [storage(8), storage(4)],
    top=1,
    inline=bytes(12),
)

SEEDS = {
    "request": eager(header(REQUEST), body()),
    "deadline": eager(header(REQUEST, deadline=5000), body()) + eager(header(REQUEST, call=2, deadline=(1 << 32) - 1)),
    "inline_tensor": eager(header(REQUEST), INLINE),
    "sparse": eager(header(RESPONSE), SPARSE),
    "per_channel": alone(
        body(
            [
                tensor(PER_CHANNEL, (2,), (1,), 0, children=2),
                tensor(STRIDED, (2,), (1,), 1),
                tensor(STRIDED, (2,), (1,), 1),
            ],
            [storage(8), storage(8)],
            top=1,
            inline=bytes(16),
        )
    ),
    "undefined": alone(body([tensor(UNDEFINED, ()), tensor(PER_TENSOR, (0,), (1,), 0)], [storage(0)])),
    "shared_storage": alone(body([STRIDED_2X3, tensor(STRIDED, (3, 2), (1, 3), 0)], [storage(24)], inline=bytes(24))),
    "spans_first": span(REQUEST, 4096, spans=2)
    + span(REQUEST, 24, index=1, spans=2, sequence=1)
    + eager(header(REQUEST, spans=2, sequence=2), body([STRIDED_2X3], [storage(24, 1)], payload=4096)),
    "body_first": eager(header(RESPONSE, spans=1), body(payload=100)) + span(RESPONSE, 100, spans=1),
    "pieces": rendezvous(header(REQUEST, index=0, spans=1, place=(60, 100)), 40)
    + eager(header(REQUEST, spans=1, sequence=1), body(payload=100))
    + rendezvous(header(REQUEST, index=0, spans=1, sequence=2, place=(0, 100)), 60),
    "overlapping_pieces": rendezvous(header(REQUEST, index=0, spans=1, place=(0, 100)), 50) * 2
    + eager(header(REQUEST, spans=1), body(payload=100)),
    "rendezvous_body": rendezvous(header(REQUEST, spans=1), 300_000) + span(REQUEST, 100, spans=1),
    "doubled_span": span(REQUEST, 8, spans=2) * 2,
    "contradicting_counts": span(REQUEST, 8, spans=2) + eager(header(REQUEST, spans=1), body(payload=8)),
    "canceled": span(REQUEST, 8, spans=2) + cancel(REQUEST) + cancel(REQUEST, 2),
    "most_spans": span(REQUEST, 8, index=(1 << 20) - 1, spans=1 << 20),
    "huge": alone(
        body([tensor(STRIDED, (1 << 62, 4), (1, 1 << 62), 0)], [storage(1 << 63)], payload=1 << 62), 1 << 62, 1 << 63
    ),
    "huge_counts": alone(struct.pack("<IIIIQII", 2, *(NOWHERE,) * 3, 1 << 63, NOWHERE, 0)),
    "controls": b"".join(eager(header(kind)) for kind in (CANCEL, GOODBYE, LEAVE, ACKNOWLEDGE))
    + eager(header(ARRIVE), struct.pack("<q", 3))
    + eager(header(RELEASE), struct.pack("<qII", 3, 1, 0) + b"why")
    + eager(header(JOIN), b'{"place": "member/1"}'),
    "other_versions": eager(header(REQUEST, version=1)) + other_length(header(REQUEST, version=1)[:40]),
    "other_lengths": b"".join(other_length(header(REQUEST)[:size]) for size in (0, 1, 3, 4, 40, 80, 87)),
    "sequence": number(0, 1, 5, 3, 3, 2, 4, 4, (1 << 64) - 1, (1 << 64) - 2, 0),
}

if __name__ == "__main__":
    CORPUS.mkdir(exist_ok=True)
    for old in CORPUS.iterdir():
        old.unlink()
    for name, seed in SEEDS.items():
        (CORPUS / name).write_bytes(seed)
