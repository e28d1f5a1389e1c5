"""EMULATED: `python -m worker.check` among the vendor's real packages, where things are broken."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from kit.commands.support import producer_env
from kit.engines.emulated_npu import STAND_IN, emulated_env

from demo.stack import ROOT, RedisServer
from worker.engine.rbln.model import CONFIG_NAME

pytestmark = pytest.mark.timeout(300)


def check(redis: RedisServer, model: Path, **env: str) -> tuple[int, str]:
    """Return the command's exit status and what it said."""
    env = emulated_env(model) | {"WARMQ_MODEL": str(model)} | env
    done = subprocess.run(
        [sys.executable, "-m", "worker.check"], cwd=ROOT, text=True, capture_output=True,
        env=producer_env(redis.url, **env), check=False,
    )  # fmt: skip
    # Its own packages warn that the emulated compiler is no distribution.
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def assert_told(text: str, findings: dict[str, str]) -> None:
    """Assert that each problem is followed by its remedy."""
    told = list(pairwise(text.splitlines()))
    for problem, remedy in findings.items():
        assert any(problem in line and remedy in after for line, after in told), (problem, text)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [("1", "RBLN-CA25 (emulated)"), ("0,1", "RBLN-CA25, RBLN-CA25 (emulated)")],
)
def test_nothing_in_the_way(
    machine: tuple[RedisServer, Path], artefacts: dict[str, Path], wanted: str, words: str
) -> None:
    status, text = check(machine[0], artefacts["plain"], WARMQ_RBLN_DEVICES=wanted)
    assert status == 0, text
    assert f"{words}; the model needs 1 x RBLN-CA25" in text and "No problems found." in text


def test_rebel_is_missing(machine: tuple[RedisServer, Path], artefacts: dict[str, Path]) -> None:
    status, text = check(machine[0], artefacts["plain"], PYTHONPATH=str(ROOT))
    assert status == 1
    assert_told(text, {
        "`import vllm` fails with `No module named 'rebel'`":
            "pip install --extra-index-url https://pypi.rbln.ai/simple rebel-compiler==0.12.*",
    })  # fmt: skip


def test_a_compiler_of_another_release(
    machine: tuple[RedisServer, Path], artefacts: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "rebel_compiler-0.11.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: rebel-compiler\nVersion: 0.11.0")
    status, text = check(machine[0], artefacts["plain"], PYTHONPATH=f"{STAND_IN}:{tmp_path}")
    assert status == 1
    assert_told(text, {
        "vllm-rbln 0.12.0 and rebel-compiler 0.11.0 are of different releases":
            "Install one minor version of all three: pip install rebel-compiler==0.12.*",
        # The stand-in took this for the vendor's compiler, and did not hide it.
        "cannot be asked for its NPUs: ImportError: the tests' stand-in": "Run `rbln-smi`",
    })  # fmt: skip


def test_everything_else_that_can_be_wrong_in_one_report(
    machine: tuple[RedisServer, Path], artefacts: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(artefacts["devices"], tmp_path / "old")
    config = json.loads((folder / CONFIG_NAME).read_text())
    config |= {"optimum_rbln_version": "0.10.1", "batch_size": 1}
    (folder / CONFIG_NAME).write_text(json.dumps(config))
    (folder / "prefill.rbln").unlink()
    status, text = check(
        machine[0], folder, WARMQ_TEST_REBEL_NPU="RBLN-CR03", WARMQ_RBLN_DEVICES="0",
        WARMQ_ENGINE_ARGS="--device rbln --compiled-model-dir /m -tp 2 -pp 2 "
        "--speculative-config {} --max-num-batched-tokens 512 --max-num-seqs 8 "
        "--max-model-len 8192",
        WARMQ_STALL_TIMEOUT_S="60",
    )  # fmt: skip
    assert status == 1
    assert_told(text, {
        "compiled for RBLN-CA25 and the card is RBLN-CR03": "--npu RBLN-CR03",
        "compiled for 2 devices and 1 are visible": "WARMQ_RBLN_DEVICES",
        "compiled by optimum-rbln 0.10.1; 0.12.0 is installed": "Recompile the model",
        "lacks prefill.rbln": "Copy the whole folder again",
        "was compiled for batch size 1": "--batch-size 4",
        "set `seed` are sampled unseeded": "temperature 0",
        "--device is refused": "the platform is found by itself",
        "--compiled-model-dir is refused": "WARMQ_MODEL names the compiled folder",
        "--tensor-parallel-size is refused": "--num-devices N",
        "--pipeline-parallel-size is refused": "--num-devices N",
        "--speculative-config is refused": "without speculation",
        "--max-num-batched-tokens 512 conflicts": "Leave it out",
        "--max-num-seqs 8 has no effect": "--batch-size 8",
        "--max-model-len 8192 has no effect": "--max-seq-len 8192",
        "WARMQ_STALL_TIMEOUT_S=60 is not longer": "raise WARMQ_STALL_TIMEOUT_S",
    })  # fmt: skip
