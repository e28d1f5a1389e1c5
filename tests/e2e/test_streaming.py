"""Text while it runs, from the real engine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from kit.stacks.real_stack import Stack, frozen, write_jsonl

from contract.streaming import Listener, Piece, texts_of
from demo.stack import Worker, eventually

pytestmark = pytest.mark.timeout(180)
LONG = {"max_tokens": 900, "ignore_eos": True, "seed": 7}
FORMS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "n": 2, **LONG},
    "completion": {"prompt": ["2 + 3 =", "a b"], "n": 2, **LONG},
    # Several choices, or a slow machine reads only when all of it is written.
    "with a stop text": {"prompt": "2 + 3 =", "stop": ["no text has this"], "n": 8, **LONG},
}


@pytest.mark.parametrize("form", FORMS)
def test_text_comes_while_the_engine_writes_it_and_makes_up_the_result(
    stack: Stack, worker: Worker, tmp_path: Path, form: str
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"custom_id": "long", **FORMS[form]}])
    batch_id = f"stream-{form.replace(' ', '-')}"
    with frozen(worker):  # so that the listener is there before the engine begins
        run = stack.producer("submit", source, "--batch-id", batch_id)
        assert run.returncode == 0, run.stderr
        _, request_id = stack.store.find(stack.batch(batch_id), "long")
        listener = Listener(stack.client, [request_id])
        transcript = listener.transcripts[request_id]
        listener.read(0)
    pieces: list[tuple[float, Piece]] = []

    def read() -> bool:
        listener._announce_at = min(listener._announce_at, time.monotonic() + 1)  # slow machine
        pieces.extend((time.time(), piece) for piece in listener.read(0.1))
        return bool(transcript.ended)

    eventually(read, 120, "the end", every_s=0)
    listener.close()
    # It is the result, as far as it was heard
    assert transcript.ended == "completed"
    (line,) = stack.producer("results", batch_id).stdout.splitlines()
    texts = texts_of(json.loads(line)["response"]["body"])
    assert all(texts[n].startswith(text) for n, text in transcript.texts.items())
    assert min(map(len, transcript.texts.values())) > 100
    # Of which a part came before there was a result: on a slow machine one choice's whole text may
    # be read at once, but not that of all
    at, first = pieces[0]
    assert len(first.text) < sum(map(len, texts.values()))
    assert 1000 * at < stack.batch(batch_id).number("finished_at")
