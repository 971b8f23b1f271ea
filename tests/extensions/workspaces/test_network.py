"""The proxy of a workspace, which knows a few names, and tricks to reach others through it."""

import socket
import threading

import pytest

from rl4llm.extensions.workspaces import Workspaces, network
from rl4llm.extensions.workspaces.network import Doors, public_address

NAMES = ["localhost", "allowed.example"]
REFUSED = {
    "an address in place of a name": "CONNECT 93.184.216.34:443 HTTP/1.1",
    "an address of loopback": "CONNECT 127.0.0.1:{port} HTTP/1.1",
    "a name that resolves to loopback": "CONNECT localhost:443 HTTP/1.1",
    "another name": "CONNECT evil.example:443 HTTP/1.1",
    "a name that ends alike": "CONNECT notallowed.example:443 HTTP/1.1",
    "a name below": "CONNECT x.allowed.example:443 HTTP/1.1",
    "another port": "CONNECT allowed.example:22 HTTP/1.1",
    "another port without CONNECT": "GET http://allowed.example:8080/ HTTP/1.1",
    "a user that looks like the name": "GET http://allowed.example@evil.example/ HTTP/1.1",
    "another scheme": "GET ftp://allowed.example/ HTTP/1.1",
    "a path alone": "GET / HTTP/1.1\r\nHost: allowed.example",
    "the service of metadata": "GET http://169.254.169.254/latest HTTP/1.1",
    "an address of IPv6": "CONNECT [::1]:443 HTTP/1.1",
    "an address as a number": "CONNECT 2130706433:443 HTTP/1.1",
}
CLIENT = """
import socket, sys
for line in {lines!r}:
    c = socket.create_connection(('127.0.0.1', 3128), 10); c.settimeout(20)
    c.sendall((line + '\\r\\n\\r\\n').encode())
    print(c.recv(100).split(b'\\r')[0].decode())
"""


@pytest.fixture(scope="module")
def secret_port():
    """A server of the host that no workspace may reach; it fails the test that did."""
    reached = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while True:
                try:
                    reached.append(server.accept())
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        assert reached == []


def test_the_proxy_refuses_what_is_not_on_its_list(_walls, play, secret_port):
    pool = Workspaces(network=NAMES)
    lines = [line.replace("{port}", str(secret_port)) for line in REFUSED.values()]
    code = CLIENT.replace("{lines!r}", repr(lines))
    result = play(lambda workspace: workspace.run(["/usr/bin/python3", "-c", code], wall_s=200), pool=pool)
    announced = play(
        lambda workspace: workspace.run(["sh", "-c", "echo $HTTPS_PROXY $http_proxy"], wall_s=30), pool=pool
    )
    pool.close()
    assert result.output.splitlines() == ["HTTP/1.1 403 Forbidden"] * len(lines), result.output
    assert announced.output == "http://127.0.0.1:3128 http://127.0.0.1:3128\n"


@pytest.fixture
def through(monkeypatch):
    """Return through(request): what a server gets and a client of the proxy, with every allowed name at that server."""
    got = []

    def answer(server):
        connection, _ = server.accept()
        got.append(connection.recv(4096).decode())
        connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\n\r\n")
        connection.close()

    def asked(*pieces):
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_server(("127.0.0.1", 0)) as proxy,
        ):
            threading.Thread(target=answer, args=(server,), daemon=True).start()
            address = server.getsockname()
            connect = socket.create_connection
            monkeypatch.setattr(
                network.socket, "create_connection", lambda _, seconds: connect(address, seconds)
            )
            monkeypatch.setattr(network, "public_address", lambda name, port: "93.184.216.34")
            doors = Doors({}, NAMES, 3128)
            threading.Thread(target=doors._accept, args=(proxy, frozenset(NAMES)), daemon=True).start()
            client = socket.socket()
            client.connect(proxy.getsockname())
            client.settimeout(10)
            received = b""
            for piece in pieces:
                client.sendall(piece)
                received += client.recv(4096)
            return got[-1], received.decode()

    return asked


def test_a_request_through_the_proxy_has_the_name_of_its_url(through):
    request = b"GET http://allowed.example/a?b HTTP/1.1\r\nHost: evil.example\r\nProxy-Authorization: x\r\nA: b\r\n\r\n"
    got, received = through(request)
    assert got == "GET /a?b HTTP/1.1\r\nHost: allowed.example\r\nA: b\r\nConnection: close\r\n\r\n"
    assert received.startswith(
        "HTTP/1.1 302 Found"
    )  # the client comes back with the new place, which is judged then


def test_a_tunnel_passes_bytes_both_ways(through):
    got, received = through(b"CONNECT allowed.example:443 HTTP/1.1\r\n\r\n", b"hello")
    assert got == "hello" and received.startswith("HTTP/1.1 200") and "302" in received


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "fd00::1", "::ffff:127.0.0.1"]
)
def test_a_name_of_a_private_address_is_not_reached(address, monkeypatch):
    entries = [(0, 0, 0, "", ("93.184.216.34", 443)), (0, 0, 0, "", (address, 443))]
    monkeypatch.setattr(network.socket, "getaddrinfo", lambda *_, **__: entries)
    assert public_address("allowed.example", 443) is None
    entries.pop()
    assert public_address("allowed.example", 443) == "93.184.216.34"
