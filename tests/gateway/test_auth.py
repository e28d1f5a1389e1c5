"""Who may call a gateway: the SDKs with keys of all kinds, and programs without any."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import anthropic
import httpx
import openai
import orjson
import pytest
import redis
from kit.commands.support import producer_command, producer_env, run_producer
from kit.gateways.gateway_process import GatewayProcess, free_port

from contract.redis.batches import BatchStore
from demo.stack import eventually
from gateway.auth import is_loopback, key_in
from gateway.http.errors import ApiError
from gateway.redis.api_keys import KEYS, ApiKeys


@pytest.fixture
def keys(gateway: GatewayProcess, store: BatchStore) -> ApiKeys:
    """Return the keys of a Redis that holds one; the gateway has noticed."""
    found = ApiKeys.using(store)
    found.create("somebody")
    eventually(lambda: status(gateway) == 401, 10, "the gateway knows that there are keys")
    return found


def status(gateway: GatewayProcess, path: str = "/v1/nothing", **headers: str) -> int:
    """Return the status of a GET; the path is none of the gateway's: 404 for whoever may call."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.get(gateway.url + path, headers=sent).status_code


def refused_by_sdk(gateway: GatewayProcess, key: str) -> openai.AuthenticationError | None:
    """Return the SDK's error for a key; None if the key is taken."""
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)
    try:
        client.get("/nothing", cast_to=object)
    except openai.AuthenticationError as error:
        return error
    except openai.NotFoundError:
        pass
    return None


def test_a_right_key_is_taken_a_wrong_one_is_an_authentication_error(
    gateway: GatewayProcess, keys: ApiKeys
) -> None:
    secret, _ = keys.create("a")
    assert refused_by_sdk(gateway, secret) is None
    for wrong in ("sk-wrong", secret[:-1], f"{secret}x", secret.swapcase()):
        error = refused_by_sdk(gateway, wrong)
        assert error is not None, wrong
        assert error.code == "invalid_api_key"
        assert error.type == "invalid_request_error"
        assert error.request_id
        assert wrong not in error.message


def test_a_revoked_key_is_refused_within_a_second(gateway: GatewayProcess, keys: ApiKeys) -> None:
    secret, key = keys.create("a")
    for _ in range(3):
        assert refused_by_sdk(gateway, secret) is None
    keys.revoke(key.id)
    time.sleep(1)  # what is promised
    assert refused_by_sdk(gateway, secret) is not None


def test_a_key_in_use_is_refused_within_a_second_of_its_revocation(
    gateway: GatewayProcess, keys: ApiKeys
) -> None:
    secret, key = keys.create("a")
    with httpx.Client(headers={"x-api-key": secret}) as client:
        assert client.get(f"{gateway.url}/v1/nothing").status_code == 404
        keys.revoke(key.id)
        began = time.monotonic()
        while client.get(f"{gateway.url}/v1/nothing").status_code == 404:
            assert time.monotonic() - began < 10
        assert time.monotonic() - began < 4  # a second, and what a busy machine adds


def test_anthropics_header_is_taken_and_its_errors_are_its_own(
    gateway: GatewayProcess, keys: ApiKeys
) -> None:
    secret, _ = keys.create("a")
    assert status(gateway, x_api_key=secret) == 404
    assert status(gateway, authorization=f"bearer {secret}") == 404
    client = anthropic.Anthropic(base_url=gateway.url, api_key="sk-wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as raised:
        client.messages.batches.retrieve("msgbatch_1")
    body = raised.value.body
    assert isinstance(body, dict)
    assert body["type"] == "error"
    assert body["error"]["type"] == "authentication_error"
    assert raised.value.request_id == body["request_id"]


def test_without_a_key_only_what_a_balancer_asks_is_answered(
    gateway: GatewayProcess, keys: ApiKeys
) -> None:
    assert [status(gateway, path) for path in ("/health", "/ready", "/version")] == [200] * 3
    for path in ("/v1/models", "/v1/files", "/v1/batches", "/health/", "//health", "/"):
        assert status(gateway, path) == 401, path


def test_organization_and_project_change_nothing(gateway: GatewayProcess, keys: ApiKeys) -> None:
    secret, _ = keys.create("a")
    assert status(gateway, x_api_key=secret, OpenAI_Organization="b", OpenAI_Project="c") == 404


def test_before_there_is_a_key_programs_of_this_machine_may_call(
    gateway: GatewayProcess, redis_client: redis.Redis
) -> None:
    eventually(lambda: status(gateway) == 404, 10, "the gateway knows that there is no key")
    assert refused_by_sdk(gateway, "whatever") is None  # the SDK always sends one
    for name in ("localhost", "api.localhost:99", "[::1]:80"):
        assert status(gateway, host=name) == 404
    # A page of another origin in a browser here, a name that leads here, a proxy's client.
    assert status(gateway, origin="https://evil.example") == 401
    assert status(gateway, origin="http://localhost:3000") == 404
    assert status(gateway, host="evil.example") == 401
    assert status(gateway, x_forwarded_for="127.0.0.1") == 401


def test_the_first_key_closes_the_gateway_to_all_others_within_a_second(
    gateway: GatewayProcess, redis_client: redis.Redis, store: BatchStore
) -> None:
    eventually(lambda: status(gateway) == 404, 10, "the gateway knows that there is no key")
    secret, key = ApiKeys.using(store).create("a")
    time.sleep(1)
    assert status(gateway) == 401
    assert status(gateway, x_api_key=secret) == 404
    ApiKeys.using(store).revoke(key.id)
    time.sleep(1)
    assert status(gateway) == 401  # the last key's end opens nothing


def test_a_gateway_without_keys_does_not_listen_to_the_network(
    redis_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    command = producer_command("serve", "--host", "0.0.0.0", "--port", str(free_port()))
    env = producer_env(redis_url, WARMQ_GATEWAY_STORE=str(tmp_path / "files"))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2
    assert "producer keys create" in done.stderr
    assert "0.0.0.0" in done.stderr
    run_producer("keys", "create", redis_url=redis_url)
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("API      http://" in line for line in process.stderr)
        process.terminate()
        assert process.wait(20) == 0


def test_a_write_is_one_line_of_json_without_key_and_prompt(
    gateway: GatewayProcess, keys: ApiKeys
) -> None:
    secret, key = keys.create("a")
    before = len(gateway.log_path.read_text())
    httpx.post(
        f"{gateway.url}/v1/batches", content=b'{"metadata": {"secret": "prompt"}}',
        headers={"x-api-key": secret},
    )  # fmt: skip
    httpx.delete(f"{gateway.url}/v1/files/file-1", headers={"x-api-key": secret})
    status(gateway, x_api_key=secret)  # a read

    def lines() -> list[bytes]:
        new = gateway.log_path.read_bytes()[before:]
        return [line for line in new.splitlines() if line.startswith(b"{")]

    eventually(lambda: len(lines()) == 2, 10, "both lines are there")
    post, delete = map(orjson.loads, lines())
    assert post["method"] == "POST"
    assert post["bytes_in"] <= 34
    assert delete["object_id"] == "file-1"
    assert {line["tenant"] for line in (post, delete)} == {"a"}
    assert {line["key_id"] for line in (post, delete)} == {key.id}
    assert {line["status"] for line in (post, delete)} <= {400, 404, 405}
    assert secret.encode() not in b"".join(lines())
    assert b"prompt" not in b"".join(lines())


@pytest.mark.parametrize(("host", "here"), [
    ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("localhost", True),
    ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("192.168.1.1", False), ("", False),
])  # fmt: skip
def test_which_addresses_are_this_machine_alone(host: str, here: bool) -> None:
    assert is_loopback(host) is here


def test_a_key_is_read_from_either_header() -> None:
    read: Callable[..., bytes] = lambda **h: key_in({k.encode(): v for k, v in h.items()})  # noqa: E731
    assert read(authorization=b"Bearer sk-1") == b"sk-1"
    assert read(authorization=b"BEARER  sk-1 ") == b"sk-1"
    assert key_in({b"authorization": b"Basic abc", b"x-api-key": b"sk-2"}) == b"sk-2"
    assert key_in({b"authorization": b"Bearer"}) == b""
    assert read(**{"authorization": b"Bearer sk-1", "x-api-key": b"sk-1"}) == b"sk-1"
    with pytest.raises(ApiError, match="two different keys"):
        read(**{"authorization": b"Bearer sk-1", "x-api-key": b"sk-2"})


def test_the_keys_are_kept_where_the_table_says(keys: ApiKeys, redis_client: redis.Redis) -> None:
    assert redis_client.type(KEYS) == b"hash"
