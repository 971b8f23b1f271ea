"""Orders and answers between the trainer, the keeper and the holders."""

from __future__ import annotations

import json
import os
import socket
from array import array
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


def send(control: socket.socket, order: Mapping[str, Any], *descriptors: int) -> None:
    """Send an order of any length, with descriptors."""
    with open(os.memfd_create("order"), "wb") as file:
        file.write(json.dumps(order).encode())
        file.flush()
        socket.send_fds(control, [b"+"], [file.fileno(), *descriptors])


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next order and its descriptors; an empty order at the end of the connection."""
    word, descriptors = receive_descriptors(control)
    if not word:
        return {}, []
    with open(descriptors[0], "rb") as file:
        file.seek(0)
        return json.load(file), descriptors[1:]


def receive_descriptors(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next message of one byte, and its descriptors, which no program inherits."""
    # socket.recv_fds of Python 3.11 drops its flags
    word, parts, _, _ = connection.recvmsg(1, socket.CMSG_LEN(16 * 4), socket.MSG_CMSG_CLOEXEC)
    numbers = array("i", b"".join(part for _, _, part in parts))
    return word, list(numbers)


def answer(reply: int, message: Mapping[str, Any]) -> None:
    """Write a message to a pipe, whose reader may have ended."""
    with suppress(OSError), open(reply, "wb", closefd=False) as file:
        file.write(json.dumps(message).encode() + b"\n")
