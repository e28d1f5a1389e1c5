"""Each hostile request, alone and in batches, at the real engine: nobody else notices it.

`make faults` sends those that were, or nearly were, noticed before there were bounds for their
kind; `make faults-full` all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from kit.engines.run_batch_lines import NAME
from kit.hostile.attacked import Attacked, attacked
from kit.hostile.hostile_batches import ends_of, send_as_batches
from kit.hostile.hostile_requests import REQUESTS

#: The worst of each kind, but those of `n` of 128: a thousand sequences take all of two cores.
QUICK = (
    "prompts cut off, 512", "tokenize 7 MB", "chat cut off, 7 MB", "embeddings of 7 MB",
    "100,000 messages", "100,000 parts", "100,000 blocks in a block", "1,024 prompts",
    "a role of 7 MB cut off", "a key of 7 MB to count",
    "arguments of 5 MB", "logit_bias of 400,000",
    "2,048 messages", "8,000 parts", "8,000 parts of a response",
    "450 prompts of 1,000 ids cut off", "1,000 prompts with logprobs",
    "logprobs of 128 long answers", "300 optional properties", "regex of 10,000 words",
    "image that is a bomb", "JSON 5,000 deep",
)  # fmt: skip
ROWS = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in REQUESTS]
#: All batches together have so long.
BATCHES_S = 240.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """Return a gateway and a worker with vLLM and the shipped model; they start once."""
    with attacked(tmp_path_factory.mktemp("attacked")) as found:
        yield found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ROWS)
def test_nobody_else_notices_it(stack: Attacked, name: str) -> None:
    REQUESTS[name].content(NAME)  # what it takes to make it is no time of the others
    assert stack.attack(lambda: stack.online(REQUESTS[name])) == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nobody_notices_them_as_lines_of_batches_and_each_has_its_own_end(stack: Attacked) -> None:
    ends: dict[str, list[str]] = {}

    def sends() -> str:
        with stack.sdk(stack.hostile) as client:
            until = time.monotonic() + BATCHES_S
            for sent in send_as_batches(client, list(REQUESTS.values())):
                ends.update(ends_of(client, sent, max(1, until - time.monotonic())))
        return ""

    broken: dict[str, object] = dict(stack.attack(sends))
    assert broken | {name: found for name, found in ends.items() if found} == {}
    assert ends.keys() == REQUESTS.keys()
