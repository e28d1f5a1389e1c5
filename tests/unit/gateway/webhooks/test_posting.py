"""One POST to a receiver: whatever goes wrong, it was not delivered."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.redis_servers.debian_redis import Authority

from contract.webhooks import NotDelivered, post


@pytest.fixture
def asks_for_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the URL of a server that takes no client without a certificate. Under TLS 1.3 it says
    so after the client's handshake."""
    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority.ca)
    context.load_cert_chain(authority.cert, authority.key)
    refused: list[BaseException] = []

    def refuse() -> None:
        plain, _ = server.accept()
        with context.wrap_socket(plain, True, do_handshake_on_connect=False) as sock:
            try:
                sock.do_handshake()
            except ssl.SSLError as error:
                refused.append(error)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):  # closed with bytes unread it would send no alert
                pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=refuse, daemon=True)
        thread.start()
        yield f"https://127.0.0.1:{server.getsockname()[1]}/"
        thread.join(10)
    assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in str(refused[0])


def test_a_receiver_that_refuses_the_client_has_not_answered(asks_for_a_certificate: str) -> None:
    with pytest.raises(NotDelivered, match="SSLError"):
        post(asks_for_a_certificate, b"{}", {}, private=True)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n", 204),
        (b"HTTP/1.0 500\r\n\r\n", 500),
        (b"HTTP/1.1 200 OK\r\ncontent-len", None),
        (b"HTTP/1.1 100 Continue\r\n\r\n", None),
        (b"SSH-2.0-OpenSSH\r\n", None),
        (b"HTTP/1.1 200 OK\r\na: " + b"b" * 100_000 + b"\r\n\r\n", None),
        (b"", None),
    ],
)
def test_only_a_whole_answer_counts(answer: bytes, status: int | None) -> None:
    def serve() -> None:
        sock, _ = server.accept()
        with sock:
            sock.recv(4096)
            sock.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        if status is not None:
            assert post(url, b"{}", {}, private=True) == status
        else:
            with pytest.raises(NotDelivered):
                post(url, b"{}", {}, private=True)
