"""The proxy for tests of faults."""

import socket
import struct

from tests.support.faults import Proxy


def test_reset_connection_does_not_spoil_the_next_one():
    """The proxy's sockets of the second connection get the file descriptors of the first one's."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        Proxy(*server.getsockname()) as proxy,
        socket.socket() as client,
        socket.socket() as next_client,
    ):
        client.connect(proxy.address)
        # The server does not close its side, so the proxy's second direction waits for its bytes.
        served, _ = server.accept()
        with served:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            proxy.until(lambda: not proxy.num_connections)
            next_client.settimeout(20)
            next_client.connect(proxy.address)
            answering, _ = server.accept()
            with answering:
                answering.sendall(b"answer")
                assert next_client.recv(6) == b"answer"
