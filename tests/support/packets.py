"""A host that vanishes, for tests on one machine without privileges."""

import ctypes
import os
import socket
import struct
import sys

import pytest

needs_packet_filters = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="needs Linux's packet filters and its figures of connections"
)
_SO_ATTACH_FILTER = 26
"""Of Linux, on the processors that torch runs on."""


def deafen(descriptor: int) -> None:
    """Let the kernel drop every packet for a socket without a reply or reset, as if its host were gone."""
    drop = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # a packet filter's "return 0 bytes of it"
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(drop)))
