"""The plan at /ui/submit: for the tenant of the caller, and none with a bad field."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.commands.support import chat_line, write_lines

from contract.redis.batches import BatchStore
from contract.redis.pace import Pace
from contract.redis.tenants import Tenant, Tenants
from gateway.http.caller import Caller
from gateway.page.file_plan import PLANNED_BYTES, Choices, plan_file
from gateway.page.file_reading import ReadGuard
from gateway.settings import GatewaySettings
from producer.time_left import Outlook, OutlookReads


def test_the_plan_counts_with_the_cap_of_the_callers_tenant(
    store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Tenants.using(store).set_tenant(Tenant("lab", max_in_flight=4))
    monkeypatch.setattr(
        OutlookReads, "outlook_of", lambda self, *_: Outlook(Pace(1.0, 64.0), caps=self._caps())
    )
    lines = [chat_line(f"r{n}") | {"method": "POST", "url": "/v1/chat/completions"}
             for n in range(200)]  # fmt: skip
    path = write_lines(tmp_path / "in.jsonl", lines)
    files = SimpleNamespace(read=lambda *_: [path.read_bytes()], local=lambda _: nullcontext(path))
    services: Any = SimpleNamespace(
        settings=GatewaySettings(files_dir=tmp_path), batches=store, store=files
    )
    record: Any = SimpleNamespace(id="file-1", filename="in.jsonl", bytes=path.stat().st_size)

    def seconds(tenant: str) -> float:
        found = plan_file(services, Caller(tenant), record, Choices(), ReadGuard())
        assert found.plan is not None, found.problem
        assert found.plan.seconds
        return found.plan.seconds

    assert seconds("lab") == pytest.approx(16 * seconds("default"))


@pytest.mark.parametrize("size", [0, PLANNED_BYTES + 1])
def test_a_bad_field_is_named_instead_of_a_plan(
    store: BatchStore, tmp_path: Path, size: int
) -> None:
    path = write_lines(tmp_path / "in.jsonl", [chat_line("a")])
    files = SimpleNamespace(read=lambda *_: [path.read_bytes()], local=lambda _: nullcontext(path))
    services: Any = SimpleNamespace(
        settings=GatewaySettings(files_dir=tmp_path), batches=store, store=files
    )
    record: Any = SimpleNamespace(id="f", filename="in.jsonl", bytes=size or path.stat().st_size)
    choices = Choices(fields="max_tokens=abc")
    found = plan_file(services, Caller("default"), record, choices, ReadGuard())
    assert "max_tokens" in found.problem
    assert (found.plan, found.prompts, found.refused) == (None, [], [])
