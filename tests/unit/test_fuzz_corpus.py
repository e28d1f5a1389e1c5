"""All that the fuzzer ever found worth keeping still comes to a clear end."""

from __future__ import annotations

import pytest
from fuzz import corpus
from fuzz.targets import TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_every_input_of_the_corpus_is_handled(target: str):
    inputs = corpus.load(target)
    assert inputs
    for data in inputs:
        TARGETS[target](data)
