"""The wire format of protocol buffers, as far as Tinker's messages use it: no schema, no dependency.

A message is a run of fields. Each begins with a varint, field number * 8 + wire type, and is followed by a varint (type 0),
eight bytes (1), a length and that many bytes (2), or four bytes (5).
https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from rl4llm.core.errors import DataError

Value = int | float | bytes
Fields = dict[int, list[Value]]
"""What a message holds, by field number: every occurrence, in order."""


def parse(data: bytes) -> Fields:
    """Return the fields of a message; raise DataError if it is not one."""
    found: Fields = {}
    at = 0
    try:
        while at < len(data):
            key, at = _varint(data, at)
            value, at = _value(key & 7, data, at)
            found.setdefault(key >> 3, []).append(value)
    except (IndexError, struct.error):
        raise DataError("The body of the request is not a whole protobuf message.") from None
    return found


def _value(kind: int, data: bytes, at: int) -> tuple[Value, int]:
    if kind == 0:
        return _varint(data, at)
    if kind in (1, 5):
        form = "<d" if kind == 1 else "<f"
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    if kind != 2:
        raise DataError(f"The body of the request has the wire type {kind}, which protobuf 3 does not use.")
    length, at = _varint(data, at)
    if at + length > len(data):
        raise IndexError
    return data[at : at + length], at + length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at


def texts(fields: Fields, number: int) -> list[str]:
    """Return the strings of a field."""
    return [value.decode() for value in blobs(fields, number)]


def blobs(fields: Fields, number: int) -> list[bytes]:
    """Return the bytes of a field, or its messages before they are parsed."""
    return [value for value in fields.get(number, []) if isinstance(value, bytes)]


def integer(fields: Fields, number: int) -> int:
    """Return the last integer of a field; 0 without one, as proto3 has it."""
    return int(fields[number][-1]) if number in fields else 0


def integers(fields: Fields, number: int) -> list[int]:
    """Return the integers of a repeated field, which may be packed into one run of bytes."""
    found: list[int] = []
    for value in fields.get(number, []):
        if not isinstance(value, bytes):
            found.append(int(value))
            continue
        at = 0
        while at < len(value):
            item, at = _varint(value, at)
            found.append(item)
    return found


def entries(fields: Fields, number: int) -> dict[str, Fields | Value]:
    """Return the entries of a map by their key: a message as its fields, any other value as it is."""
    found: dict[str, Fields | Value] = {}
    for entry in map(parse, blobs(fields, number)):
        value = entry[2][-1]
        found[texts(entry, 1)[-1]] = parse(value) if isinstance(value, bytes) else value
    return found


def field(number: int, value: Value | str) -> bytes:
    """Return an encoded field: a double for a float, else a varint or bytes."""
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def packed(number: int, values: Iterable[int]) -> bytes:
    """Return a repeated integer field in the packed form."""
    return field(number, b"".join(map(varint, values)))


def varint(number: int) -> bytes:
    """Return a number, 7 bits a byte, the lowest first."""
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)
