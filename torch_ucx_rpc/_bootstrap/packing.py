"""Many records in few bytes, so that all workers can read all records.

Records of one job resemble each other. So `pack` stores them by column. If all records share a value, it stores that
value once. It stores numbers as differences. For names that consist of a prefix and the rank, it stores only the
prefix. It stores addresses byte by byte: the first bytes of all before the second bytes of all. An address repeats some
values, and `pack` stores repeated columns only once.

A record has 950 bytes as JSON, and 35 to 40 bytes here after zlib. 32 of them are random, so no coding can spare them:
the session, and the numbers by which UCX tells workers and their queues apart.
"""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from collections.abc import Sequence
from typing import Any

from torch_ucx_rpc._bootstrap.record import Record

# Limit of the unpacked bytes, and of the addresses, so that bytes from a stranger do not fill the memory.
_MOST_BYTES = 1 << 28


def pack(records: Sequence[Record]) -> bytes:
    """The records as `unpack` reads them."""
    addresses = [record.address for record in records]
    by_byte = [bytes(column) for column in itertools.zip_longest(*addresses, fillvalue=0)]
    place_of: dict[bytes, int] = {}
    places = [place_of.setdefault(column, len(place_of)) for column in by_byte]
    columns: dict[str, Any] = {
        "lengths": _column([len(address) for address in addresses]),
        "places": places,
    }
    names = [record.name for record in records]
    prefix = names[0].removesuffix(str(records[0].rank))
    is_rule = names == [f"{prefix}{record.rank}" for record in records]
    values = [record.to_values() for record in records]
    for field in values[0].keys() - {"address", "session"}:
        columns[field] = _column([value[field] for value in values])
    if is_rule:
        columns["name"] = {"prefix": prefix}
    head = json.dumps([len(records), columns]).encode()
    sessions = struct.pack(f"<{len(records)}Q", *(record.session for record in records))
    return zlib.compress(struct.pack("<I", len(head)) + head + sessions + b"".join(place_of), 9)


def unpack(packed: bytes) -> list[Record]:
    """The records that `pack` packed; ValueError for other bytes."""
    try:
        decompressor = zlib.decompressobj()
        plain = decompressor.decompress(packed, _MOST_BYTES)
        if not decompressor.eof:
            raise ValueError("the end is missing")
        (length,) = struct.unpack_from("<I", plain)
        count, columns = json.loads(plain[4 : 4 + length])
        sessions = struct.unpack_from(f"<{count}Q", plain, 4 + length)
        begin, places = 4 + length + 8 * count, columns.pop("places")
        if len(places) * count > _MOST_BYTES:
            raise ValueError("the addresses are too long")
        by_byte = b"".join(plain[begin + place * count : begin + (place + 1) * count] for place in places)
        lengths = _row(columns.pop("lengths"), count)
        addresses = [by_byte[number::count][:size] for number, size in enumerate(lengths)]
        rows = {field: _row(column, count) for field, column in columns.items() if field != "name"}
        name = columns["name"]
        rows["name"] = [f"{name['prefix']}{rank}" for rank in rows["rank"]] if "prefix" in name else _row(name, count)
        return Record.of_columns({**rows, "session": list(sessions), "address": addresses})
    # Wrong bytes may raise any of these.
    except (AttributeError, LookupError, TypeError, ValueError, struct.error, zlib.error) as error:
        raise ValueError(f"these are not the records of workers: {error}") from error


def _column(values: list[Any]) -> dict[str, Any]:
    if all(value == values[0] for value in values):
        return {"all": values[0]}
    if all(type(value) is int for value in values):
        return {"first": values[0], "steps": [after - before for before, after in itertools.pairwise(values)]}
    return {"each": values}


def _row(column: dict[str, Any], count: int) -> list[Any]:
    if "all" in column:
        return [column["all"]] * count
    if "steps" in column:
        return list(itertools.accumulate(column["steps"], initial=column["first"]))
    each: list[Any] = column["each"]
    return each
