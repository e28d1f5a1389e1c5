"""EMULATED: the other forms of a compiled model; a card that another has; a killed worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.engines.emulated_batch import assert_settled, lines_of, prompts
from kit.engines.emulated_npu import Emulated

from demo.stack import eventually
from worker.engine.rbln.model import read_artefact

pytestmark = pytest.mark.timeout(300)


def test_the_compiled_folders_are_what_was_asked_for(artefacts: dict[str, Path]) -> None:
    found = {name: read_artefact(folder) for name, folder in artefacts.items()}
    assert all(a is not None and not a.missing for a in found.values())
    flash, buckets, devices = found["flash"], found["buckets"], found["devices"]
    assert flash is not None and buckets is not None and devices is not None
    assert (flash.block_size, flash.flash_attention, buckets.buckets) == (1024, True, (4, 2, 1))
    assert devices.num_devices == 2


def test_a_worker_whose_card_another_has_ends_and_keeps_its_queue(
    forms: dict[str, Emulated], greedy: Any
) -> None:
    asked, devices = prompts(4, seed=3), forms["devices"]
    forms["flash"].ready()
    refused = devices.begin(rbln_devices="3,4")  # 3 is flash's
    producer = devices.submit("kept", lines_of(asked))
    assert refused.process is not None
    assert refused.process.wait(180) == 1
    assert "SYS_EBUSY: Lack of device memory. (code: -16)" in devices.log()[-4000:]
    assert sum(devices.store.queue_lengths("warmq.devices").values()) == 4
    # The remedy: other cards. The next worker takes what waits.
    devices.begin(rbln_devices="4,5")
    assert devices.collect("kept", producer, 180).all_tokens() == greedy(asked)
    assert_settled(devices.store, devices.redis.folder, "kept", lines_of(asked))


@pytest.mark.parametrize(("name", "batch"), [("buckets", 4), ("flash", 2), ("devices", 2)])
def test_other_forms_give_the_same_tokens(
    forms: dict[str, Emulated], greedy: Any, name: str, batch: int
) -> None:
    asked = prompts(12, seed=6)
    if name == "flash":
        asked[0] = [5 + n % 900 for n in range(1100)]  # more than one partition
    stack = forms[name]
    stack.ready()
    before = len(stack.steps())
    assert stack.run(name, lines_of(asked)).all_tokens() == greedy(asked)
    decodes = stack.decodes(before)
    assert max(live for _, live in decodes) == batch
    assert all(live <= rows for rows, live in decodes)


def test_shrinking_batches_take_smaller_buckets(forms: dict[str, Emulated], greedy: Any) -> None:
    asked, counts, stack = prompts(4, seed=11), (4, 6, 9, 12), forms["buckets"]
    stack.ready()
    before = len(stack.steps())
    lines = [line | {"max_tokens": n} for line, n in zip(lines_of(asked), counts, strict=True)]
    expected = [tokens[:n] for tokens, n in zip(greedy(asked), counts, strict=True)]
    assert stack.run("shrinking", lines).all_tokens() == expected
    steps = set(stack.decodes(before))
    assert {(4, 4), (2, 2), (1, 1)} <= steps
    assert all(rows == min(b for b in (1, 2, 4) if b >= live) for rows, live in steps)
    told = [worker.get("buckets") for worker in stack.store.workers(stack.queue)]
    assert [4, 2, 1] in told  # the page shows them


def test_an_idle_worker_that_is_killed_takes_its_engine_along(forms: dict[str, Emulated]) -> None:
    stack = forms["buckets"]
    stack.ready()
    stack.new_page()
    engine = stack.engine_process()
    assert stack.worker is not None and stack.worker.process is not None
    stack.worker.process.kill()
    stack.worker.process.wait()
    # SIGTERM, not SIGKILL: the engine says that it was asked, and leaves its device in order.
    eventually(lambda: not engine.is_running(), 30, "the engine has ended")
    stack.logged("received signal=SIGTERM", 5)
