"""Options of the tutorials' time are refused before anything is loaded, with today's form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from demo.stack import ROOT
from worker.vllm_options import GONE, SPECULATION, judge_options


@pytest.mark.parametrize(
    ("args", "remedy"),
    [
        ("--max_seq_len 4096", "--max-model-len 4096"),
        ("--max-seq-len=4096", "--max-model-len 4096"),
        ("--use-v2-block-manager", "Leave it out"),
        ("--device cuda", "found by itself"),
        ("--worker-use-ray", "--distributed-executor-backend ray"),
        (
            "--speculative-model [ngram] --num-speculative-tokens 5 --ngram-prompt-lookup-max 4",
            '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}',
        ),
        (
            "--speculative_model facebook/opt-125m --num_speculative_tokens 5",
            '{"model": "facebook/opt-125m", "num_speculative_tokens": 5}',
        ),
        ("--ngram-prompt-lookup-max 4", '{"method": "ngram", "prompt_lookup_max": 4}'),
    ],
)
def test_an_old_spelling_is_refused_with_todays(args: str, remedy: str) -> None:
    (finding,) = judge_options(args, None)
    assert finding.fatal
    assert remedy in finding.remedy


@pytest.mark.parametrize("name", [*GONE, *SPECULATION])
def test_every_old_option_is_named_once(name: str) -> None:
    (finding,) = judge_options(f"--{name} 4", None)
    assert f"--{name} " in finding.problem


def test_every_old_option_is_on_the_page() -> None:
    page = (ROOT / "docs" / "engine-vllm.md").read_text()
    assert [name for name in (*GONE, *SPECULATION) if f"--{name}" not in page] == []


def test_todays_options_are_not_mentioned() -> None:
    args = (
        "--max-model-len 4096 --tensor-parallel-size 2 --pipeline-parallel-size 2 --max-num-seqs 8 "
        '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\''
    )
    assert list(judge_options(args, "models/tiny")) == []


def test_pipeline_stages_where_shards_would_fit_are_warned_about() -> None:
    (finding,) = judge_options("-pp 2", None)
    assert not finding.fatal
    assert "18 minutes" in finding.problem
    assert "--tensor-parallel-size 2" in finding.remedy


@pytest.mark.parametrize("form", ['--speculative-config \'{"model": "%s"}\'', "--spec-model %s"])
def test_vocabularies_of_different_sizes_are_refused_with_both_numbers(
    tmp_path: Path, form: str
) -> None:
    sizes = {"target": 32000, "draft": 50272, "same": 32000}
    for name, size in sizes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": size}))
    target = str(tmp_path / "target")
    (finding,) = judge_options(form % (tmp_path / "draft"), target)
    assert finding.fatal
    assert "50272" in finding.problem and "32000" in finding.problem
    assert list(judge_options(form % (tmp_path / "same"), target)) == []
    assert list(judge_options(form % "some/hub-name", target)) == []


def test_a_speculative_config_that_is_no_json_is_left_to_vllm() -> None:
    assert list(judge_options("--speculative-config {nope", "models/tiny")) == []
