"""Probes that are late at a server that people use: they go on until the server has answered."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from kit.drain.simulated_time import run_simulated

from worker.engine.openai import shared
from worker.engine.openai.guard import BADLY, Guard
from worker.engine.openai.shared import LATEST_PROBE, Sharing

TARGET_S = 0.05


def sharing(monkeypatch: pytest.MonkeyPatch, answer_s: float) -> tuple[Sharing, list[str]]:
    """Return a server's sharing whose probes are answered after so long, and the ends."""
    upstream: Any = SimpleNamespace(breaker=SimpleNamespace(served=()))
    fleet: Any = None
    ends: list[str] = []

    async def smallest(*_: object) -> None:
        try:
            await asyncio.sleep(answer_s)
            ends.append("answered")
        except asyncio.CancelledError:
            ends.append("ended")
            raise

    monkeypatch.setattr(shared, "smallest", smallest)
    share: Any = None
    return Sharing(upstream, Guard(ttft_s=TARGET_S), share, fleet), ends


def test_a_late_probe_counts_at_its_time_limit_and_is_answered_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measures, ends = sharing(monkeypatch, 0.4)

    async def main() -> None:
        began = time.monotonic()
        took_s = await measures._send(1)
        assert took_s == pytest.approx(BADLY * TARGET_S)
        assert time.monotonic() - began == pytest.approx(BADLY * TARGET_S)
        assert (len(measures._sent), ends) == (1, [])  # still one of ours in the server
        await asyncio.sleep(0.5)
        assert (len(measures._sent), ends) == (0, ["answered"])

    run_simulated(main(), monkeypatch)


def test_a_probe_that_is_never_answered_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    measures, ends = sharing(monkeypatch, 3600)

    async def main() -> None:
        await measures._send(1)
        await asyncio.sleep(LATEST_PROBE * BADLY * TARGET_S)
        assert (len(measures._sent), ends) == (0, ["ended"])

    run_simulated(main(), monkeypatch)
