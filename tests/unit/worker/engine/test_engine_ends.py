"""The end of an engine takes a bounded time, whatever its connections do."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

from demo.stack import MODEL, ROOT
from worker.engine import shutdown
from worker.engine.openai import OpenAISettings
from worker.engine.openai.engine import OpenAIEngine
from worker.engine.triton import TritonSettings
from worker.engine.triton.engine import TritonEngine


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait long for connections."""
    monkeypatch.setattr(shutdown, "CLOSE_S", 0.2)


class Connection:
    """Closes, or hangs while it does."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.hangs = hangs
        self.closed = False

    async def close(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        self.closed = True


async def test_the_openai_engine_does_not_wait_for_ever_for_its_session() -> None:
    engine = OpenAIEngine(OpenAISettings(engine="openai", openai_base_urls="http://127.0.0.1:1/v1"))
    engine._loop = asyncio.get_running_loop()
    engine._session = Connection(hangs=True)  # type: ignore[assignment]
    with pytest.raises(TimeoutError, match="connections were not closed"):
        await asyncio.wait_for(asyncio.to_thread(engine.shutdown), 5)


async def test_a_triton_server_that_hangs_does_not_keep_the_others_open() -> None:
    engine = TritonEngine(TritonSettings(engine="triton", model=str(MODEL)))
    engine._loop = asyncio.get_running_loop()
    servers = [Connection(hangs=True), Connection()]
    engine._servers.servers = servers  # type: ignore[assignment]
    with pytest.raises(TimeoutError, match="connections were not closed"):
        await asyncio.wait_for(asyncio.to_thread(engine.shutdown), 5)
    assert [server.closed for server in servers] == [False, True]


def test_a_process_whose_stop_hangs_exits_by_itself_and_says_what_hung() -> None:
    # The expression keeps the interpreter's lock: no thread and no handler of Python's can run.
    program = (
        "import re; from worker.drain.lifecycle import ExitTimer; last = ExitTimer(); "
        "last.within(0.3); last.within(60); re.match(r'(a+)+$', 'a' * 64 + 'b')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=20,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "most recent call first" in ended.stderr


def test_ctrl_c_is_kept_from_an_engines_process_and_from_nothing_started_afterwards() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with shutdown.children_shielded():
        shielded = _blocked_in_a_child()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert {signal.SIGINT, signal.SIGQUIT} <= shielded
    assert not {signal.SIGINT, signal.SIGQUIT} & _blocked_in_a_child()


def _blocked_in_a_child() -> set[int]:
    program = "import signal; print(*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
    told = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    return set(map(int, told.stdout.split()))
