"""EMULATED: compiled models through the whole of warmq, tokens compared with transformers'."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from emulated_npu import Emulated, emulated, emulated_env, lines_of, prompts

from demo.stack import ROOT
from worker.rbln import read_artefact

pytestmark = pytest.mark.timeout(240)

WISHES = "--max-num-seqs 8 --enable-prompt-tokens-details"


@pytest.fixture(scope="module")
def plain(
    artefacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Emulated]:
    """A worker on the plain artefact; its settings are the model's folder, and one wish."""
    with emulated(tmp_path_factory.mktemp("plain")) as stack:
        stack.start(
            artefacts["plain"], engine_args="--max-num-seqs 8 --enable-prompt-tokens-details"
        )
        stack.ready()
        yield stack


def test_the_compiled_folders_are_what_was_asked_for(artefacts: dict[str, Path]) -> None:
    found = {name: read_artefact(folder) for name, folder in artefacts.items()}
    assert all(a is not None and not a.missing for a in found.values())
    flash, buckets = found["flash"], found["buckets"]
    assert flash is not None and buckets is not None
    assert (flash.block_size, flash.flash_attention, buckets.buckets) == (1024, True, (4, 2, 1))


def test_64_requests_over_batch_4_through_the_queue(plain: Emulated, greedy: Any) -> None:
    asked = prompts(64)
    run = plain.run("many", lines_of(asked))
    assert not run.errors and len(run.answers) == 64
    assert [run.tokens(f"r{n}") for n in range(64)] == greedy(asked)
    decodes = [(rows, live) for kind, rows, live in plain.steps() if kind == "decode"]
    assert {rows for rows, _ in decodes} == {4}, "the compiled batch, not the 8 asked for"
    assert max(live for _, live in decodes) == 4, "the batch was never full"
    assert {rows for kind, rows, _ in plain.steps() if kind == "prefill"} == {1}


def test_what_was_asked_for_in_vain_is_warned_about_by_name(plain: Emulated) -> None:
    assert "--max-num-seqs 8 has no effect: the compiled batch size is 4" in plain.log()
    assert "emulated on the CPU" in plain.log()
    assert "Capacity(max_num_seqs=4, max_model_len=512" in plain.log()


def test_a_prompt_longer_than_compiled_fails_alone(plain: Emulated, greedy: Any) -> None:
    asked = prompts(6, seed=5)
    lines = lines_of(asked)
    lines[3]["prompt"] = list(range(4, 604))
    run = plain.run("long", lines)
    assert (
        list(run.errors) == ["r3"]
        and run.errors["r3"]["error"]["code"] == "context_length_exceeded"
    )
    expected = greedy(asked)
    assert all(run.tokens(f"r{n}") == expected[n] for n in range(6) if n != 3)


def test_a_repeated_prefix_comes_from_the_cache(plain: Emulated, greedy: Any) -> None:
    asked = [[*range(4, 304), 9]]
    first, second = (plain.run(name, lines_of(asked)) for name in ("prefix1", "prefix2"))
    usage = second.answers["r0"]["response"]["body"]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 256, usage
    assert first.tokens("r0") == second.tokens("r0") == greedy(asked)[0]


def test_a_second_worker_sees_devices_of_its_own(
    plain: Emulated, artefacts: dict[str, Path]
) -> None:
    for wanted, words in (
        ("1", "RBLN-CA25 (emulated)"),
        ("0,1", "RBLN-CA25, RBLN-CA25 (emulated)"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "worker.check"], cwd=ROOT, capture_output=True, text=True,
            env=os.environ | emulated_env(plain.control) | {
                "WARMQ_MODEL": str(artefacts["plain"]), "WARMQ_RBLN_DEVICES": wanted,
                "WARMQ_REDIS_URL": plain.redis.url},
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        assert words in done.stdout and "1 other workers" in done.stdout


def test_the_worker_drains_and_leaves_nothing(plain: Emulated) -> None:
    assert plain.worker is not None
    engine = plain.engine_process()
    assert plain.worker.stop(90) == 0
    assert not engine.is_running()


@pytest.mark.parametrize(("name", "batch"), [("buckets", 4), ("flash", 2), ("devices", 2)])
def test_other_forms_give_the_same_tokens(
    artefacts: dict[str, Path], tmp_path: Path, greedy: Any, name: str, batch: int
) -> None:
    asked = prompts(12, seed=6)
    if name == "flash":
        asked[0] = [5 + n % 900 for n in range(1100)]  # more than one partition
    with emulated(tmp_path) as stack:
        stack.start(artefacts[name], rbln_devices="0,1")
        stack.ready()
        run = stack.run(name, lines_of(asked))
        assert not run.errors
        assert [run.tokens(f"r{n}") for n in range(len(asked))] == greedy(asked)
        decodes = [(rows, live) for kind, rows, live in stack.steps() if kind == "decode"]
        assert max(live for _, live in decodes) == batch
        assert all(live <= rows for rows, live in decodes)
        if name == "buckets":
            assert_shrinking_batches_take_smaller_buckets(stack, greedy)


def assert_shrinking_batches_take_smaller_buckets(stack: Emulated, greedy: Any) -> None:
    asked, counts = prompts(4, seed=11), (4, 6, 9, 12)
    before = len(stack.steps())
    lines = [line | {"max_tokens": n} for line, n in zip(lines_of(asked), counts, strict=True)]
    run = stack.run("shrinking", lines)
    expected = greedy(asked)
    assert [run.tokens(f"r{n}") for n in range(4)] == [
        tokens[:n] for tokens, n in zip(expected, counts, strict=True)
    ]
    steps = {(rows, live) for kind, rows, live in stack.steps()[before:] if kind == "decode"}
    assert {(4, 4), (2, 2), (1, 1)} <= steps
    assert all(rows == min(b for b in (1, 2, 4) if b >= live) for rows, live in steps)
