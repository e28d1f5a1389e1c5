"""Who is let in, byte for byte: proxies before a gateway without keys, trailers, headers twice."""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis
from kit.commands.support import producer_command, producer_env
from kit.gateways.gateway_process import GatewayProcess
from kit.stacks.celery_side import simulated

from contract.redis.batches import BatchStore
from demo.stack import RedisServer, eventually
from gateway.http.idempotency import ONLINE_BODY_TYPES
from gateway.redis.api_keys import ApiKeys

#: Nobody has this path: 404 for whoever may call, 401 for others.
NOWHERE = b"/v1/nothing"


def talk(port: int, *parts: bytes) -> tuple[int, Any]:
    """Send the parts of a request, with a moment between, until it is answered; return status and
    JSON."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        found = b""
        try:
            for part in parts:
                client.sendall(part)
                if select.select([client], [], [], 0.2)[0]:  # else the next is a packet of its own
                    break
            while part := client.recv(65536):
                found += part
        except (ConnectionResetError, BrokenPipeError):
            pass
    head, _, body = found.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body.strip() else None


def ask(
    port: int, *headers: bytes, line: bytes = b"GET " + NOWHERE, version: bytes = b"1.1",
    host: bytes = b"127.0.0.1:8000",
) -> tuple[int, Any]:  # fmt: skip
    """Send one request without a body."""
    head = [line + b" HTTP/" + version, b"Host: " + host, b"Connection: close", *headers]
    return talk(port, b"\r\n".join(head) + b"\r\n\r\n")


@pytest.fixture
def open_gateway(gateway: GatewayProcess, redis_client: redis.Redis) -> GatewayProcess:
    """Return the gateway when it knows that there is no key."""
    eventually(lambda: ask(gateway.port)[0] == 404, 10, "the gateway knows that there is no key")
    return gateway


@pytest.fixture
def secret(gateway: GatewayProcess, store: BatchStore, redis_client: redis.Redis) -> bytes:
    """Return a key; the gateway has noticed that there is one."""
    made, _ = ApiKeys.using(store).create("somebody")
    eventually(lambda: ask(gateway.port)[0] == 401, 10, "the gateway knows that there are keys")
    return made.encode()


SIGNS = """
X-Forwarded-For X-Forwarded-Host X-Forwarded-Proto X-Forwarded-Port X-Forwarded-Server Forwarded Via
X-Forwarded-Anything X-Real-IP CF-Connecting-IP CF-Ray True-Client-IP X-Client-IP X-Original-URI
X-Original-Host X-Original-Forwarded-For X-Envoy-External-Address X-Cluster-Client-IP CDN-Loop
Fastly-Client-IP x-real-ip VIA
""".split()


@pytest.mark.parametrize("name", SIGNS)
def test_without_keys_what_comes_through_a_proxy_is_refused(
    open_gateway: GatewayProcess, name: str
) -> None:
    for value in (b"127.0.0.1", b""):
        status, told = ask(open_gateway.port, name.encode() + b": " + value)
        assert status == 401, value
        assert "producer keys create" in told["error"]["message"]
        assert name.lower() in told["error"]["message"]


def test_without_keys_the_request_of_a_plain_proxy_pass_is_refused(
    open_gateway: GatewayProcess,
) -> None:
    """nginx 1.22 sends this for `proxy_pass http://127.0.0.1:8000;` and nothing else."""
    for path in (b"/v1/models", b"/v1/files", b"/ui", NOWHERE):
        sent = b"GET %s HTTP/1.0\r\nHost: 127.0.0.1:8000\r\nConnection: close\r\n" % path
        sent += b"User-Agent: curl/8\r\nAccept: */*\r\n\r\n"
        with socket.create_connection(("127.0.0.1", open_gateway.port), timeout=20) as client:
            client.sendall(sent)
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 401"), path
        assert b"HTTP/1.0" in answer
    # What balancers and probes ask is open to them, as it is with keys.
    assert ask(open_gateway.port, line=b"GET /health", version=b"1.0")[0] == 200


def test_without_keys_a_page_of_another_site_is_refused_also_without_an_origin(
    open_gateway: GatewayProcess,
) -> None:
    port, foreign = open_gateway.port, b"Sec-Fetch-Site: cross-site"
    post = b"POST /v1/nothing"
    assert ask(port, foreign, line=post)[0] == 401
    assert ask(port, foreign, b"Sec-Fetch-Mode: no-cors", b"Sec-Fetch-Dest: image")[0] == 401
    opened = (b"Sec-Fetch-Mode: navigate", b"Sec-Fetch-Dest: document")
    assert ask(port, foreign, *opened, line=post)[0] == 401  # a form
    assert ask(port, foreign, *opened)[0] == 404  # a link
    assert ask(port, foreign, b"Origin: http://localhost:3000")[0] == 404
    for same in (b"same-origin", b"none"):
        assert ask(port, b"Sec-Fetch-Site: " + same, line=post)[0] == 404


def test_with_keys_a_proxy_is_welcome(gateway: GatewayProcess, secret: bytes) -> None:
    headers = (b"X-Real-IP: 192.0.2.1", b"Via: 1.1 a", b"Authorization: Bearer " + secret)
    assert ask(gateway.port, *headers)[0] == 404
    assert ask(gateway.port, *headers, version=b"1.0", host=b"llm.example.com")[0] == 404


def test_a_gateway_without_keys_says_at_its_start_who_may_use_it(
    redis_client: redis.Redis, redis_server: RedisServer, store: BatchStore, tmp_path: Path
) -> None:
    redis_client.flushall()
    for keys in (False, True):
        if keys:
            ApiKeys.using(store).create("somebody")
        with GatewayProcess(redis_server.url, tmp_path) as made:
            log = made.log_path.read_text()
        assert log.count("the gateway has no API keys") == (not keys)


# -- trailers ------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False], ids=["one packet", "split"])
@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/files", "/v1/batches", *ONLINE_BODY_TYPES])
def test_a_trailer_is_no_header(
    gateway: GatewayProcess, secret: bytes, path: str, whole: bool
) -> None:
    head = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n" % path.encode()
    head += b"Transfer-Encoding: chunked\r\nTrailer: Authorization\r\n"
    key, wrong = b"Authorization: Bearer " + secret + b"\r\n", b"Authorization: Bearer sk-x\r\n"
    end = b"0\r\n%s\r\n"

    def sent(*parts: bytes) -> int:
        return talk(gateway.port, *([b"".join(parts)] if whole else parts))[0]

    body = b"2\r\n{}\r\n"
    assert sent(head + b"\r\n", body, end % key) == 401
    assert sent(head + wrong + b"\r\n", body, end % key) == 401
    assert sent(head + key + b"\r\n", body, end % wrong) != 401
    override = b"X-Api-Key: sk-x\r\nOrigin: https://evil.example\r\nHost: evil.example\r\n"
    assert sent(head + key + b"\r\n", body, end % override) != 401


def test_trailers_have_a_bound(gateway: GatewayProcess, secret: bytes) -> None:
    head = b"POST /v1/batches HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
    head += b"Authorization: Bearer " + secret + b"\r\n\r\n2\r\n{}\r\n"
    status, told = talk(gateway.port, head, b"0\r\nX: " + b"a" * 2_000_000)
    assert status == 431
    assert "trailers have more than 65536 bytes" in told["error"]["message"]


# -- the same thing said twice ----------------------------------------------------------


def test_two_keys_that_differ_are_refused(gateway: GatewayProcess, secret: bytes) -> None:
    port, right = gateway.port, b"Authorization: Bearer " + secret
    for other in (b"Authorization: Bearer sk-x", b"authorization: Basic eDp5"):
        for headers in ((right, other), (other, right)):
            status, told = ask(port, *headers)
            assert status == 400
            assert "two different authorization headers" in told["error"]["message"]
    assert ask(port, right, b"X-Api-Key: sk-x")[0] == 400
    assert ask(port, b"X-Api-Key: sk-x", b"X-Api-Key: " + secret)[0] == 400
    assert ask(port, right, b"Host: evil.example")[0] == 400
    assert ask(port, right, right)[0] == 404
    assert ask(port, right, b"X-Api-Key: " + secret)[0] == 404


# -- the port ---------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_that_is_taken_ends_the_start_at_once(
    gateway: GatewayProcess, redis_server: RedisServer, tmp_path: Path, host: str
) -> None:
    command = producer_command("serve", "--port", str(gateway.port), "--host", host)
    env = producer_env(redis_server.url) | {"WARMQ_GATEWAY_STORE": str(tmp_path / "files")}
    done = subprocess.run(command, env=env, capture_output=True, timeout=60, check=False)
    (line,) = done.stderr.decode().splitlines()
    assert line == (
        f"producer: port {gateway.port} of {host} is in use; name another with --port, or stop "
        "what uses it"
    )
    assert done.returncode == 2
    assert not done.stdout
    assert not (tmp_path / "files").exists()


def test_a_gateway_tells_where_page_and_api_are_and_which_models_are_served(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    with redis_server.client() as client:
        client.flushall()
    with GatewayProcess(redis_server.url, tmp_path) as made:
        first = made.log_path.read_text().splitlines()
        made.stop()
        (tmp_path / "models" / "tiny").mkdir(parents=True)
        with simulated(redis_server.url, tmp_path / "log", model=tmp_path / "models" / "tiny"):
            eventually(lambda: " ready in " in (tmp_path / "log").read_text(), 30, "it is ready")
            made.start()
    addresses = [f"page     {made.url}/ui", f"API      {made.url}/v1"]
    none = "workers  none runs; requests wait until `warmq-worker` has started one"
    assert first[-3:] == [*addresses, none]
    assert made.log_path.read_text().splitlines()[-3:] == [
        *addresses, "workers  1 ready; served models: tiny"
    ]  # fmt: skip


def test_a_gateway_ends_whenever_it_is_stopped(redis_server: RedisServer, tmp_path: Path) -> None:
    with redis_server.client() as client:
        client.flushall()
    for number in range(3):
        made = GatewayProcess(redis_server.url, tmp_path).start()
        assert made.process is not None
        made.process.send_signal(signal.SIGTERM if number else signal.SIGINT)
        made.process.wait(20)
