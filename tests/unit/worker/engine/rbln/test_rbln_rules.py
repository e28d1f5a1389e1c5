"""What is refused, overridden, passed by hand and set before an RBLN engine starts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from kit.engines.compiled_folder import compiled, read

from contract.settings import SettingsError
from worker.engine.catalogue import make_engine
from worker.engine.parent_death import ASK_FIRST_ENV
from worker.engine.rbln import rules
from worker.engine.rbln.rules import Releases, limit_options, releases_of
from worker.engine.vllm_settings import EngineArgs, VllmSettings
from worker.machine.packages import Packages, release_of

SDK_0_12 = {"vllm-rbln": "0.12.0", "optimum-rbln": "0.12.0", "rebel-compiler": "0.12.0.post1"}


def settings(model: Path | str = "m", **more: Any) -> VllmSettings:
    """Return settings that come from here alone."""
    return VllmSettings(model=str(model), _env_file=None, **more)


def found(
    folder: Path, versions: dict[str, str] | None = None, rebel: bool = True, **more: Any
) -> list[tuple[bool, str]]:
    """Return (fatal, text) of all findings about a compiled folder."""
    packages = Packages(SDK_0_12 if versions is None else versions, rebel)
    judged = rules.check_rbln(settings(folder, **more), read(folder), packages)
    return [(f.fatal, str(f)) for f in judged if "`seed`" not in f.problem]


@pytest.mark.parametrize(
    ("version", "releases", "options"),
    [
        ("0.1.2", Releases.FORK, False),
        ("0.8.0.post1", Releases.FORK, False),
        ("0.8.1", Releases.BY_HAND, True),
        ("0.9.2", Releases.BY_HAND, True),
        ("0.9.3", Releases.READS_FILE, False),
        ("0.10.4", Releases.READS_FILE, False),
        ("0.11.2.post1", Releases.READS_FILE, False),
        ("0.12.0", Releases.SUPPORTED, False),
        ("0.13.1", Releases.SUPPORTED, False),
    ],
)
def test_how_each_release_is_treated(
    tmp_path: Path, version: str, releases: Releases, options: bool
) -> None:
    folder = compiled(tmp_path, "b2_flash")
    assert releases_of(version) is releases
    words = limit_options(read(folder), version)
    assert words == (
        ["--max-num-seqs", "2", "--max-model-len", "4096", "--max-num-batched-tokens", "4096",
         "--block-size", "1024"] if options else []
    )  # fmt: skip
    judged = found(folder, {"vllm-rbln": version, "rebel-compiler": version})
    assert any(fatal for fatal, _ in judged) is (releases is Releases.FORK)
    assert bool(judged) is (releases is not Releases.SUPPORTED)


def test_a_compiled_folder_and_matching_packages_are_fine(tmp_path: Path) -> None:
    assert found(compiled(tmp_path, "b4_buckets")) == []


@pytest.mark.parametrize(
    ("args", "fatal", "words"),
    [
        ("--device rbln", True, "--device is refused.*found by itself"),
        ("--compiled_model_dir=/m", True, "--compiled-model-dir is refused.*WARMQ_MODEL"),
        ("-tp 4", True, "--tensor-parallel-size is refused.*--num-devices"),
        ("--pipeline-parallel-size=2", True, "--pipeline-parallel-size is refused"),
        ("--speculative-config '{\"a\": 1}'", True, "--speculative-config is refused"),
        ("--max-num-batched-tokens 512", True, "conflicts with the compiled prefill chunk of 128"),
        ("--max-num-seqs 8", False, "--max-num-seqs 8 has no effect.*batch size is 4"),
        ("--max-model-len 8192", False, "context length is 512.*--max-seq-len 8192"),
        ("--block-size 16", False, "KV block size is 512"),
        ("--dtype float16", False, "--dtype has no effect"),
        ("--enforce-eager", False, "--enforce-eager has no effect"),
    ],
)
def test_the_tutorials_settings_are_named_with_what_does_it_now(
    tmp_path: Path, args: str, fatal: bool, words: str
) -> None:
    ((is_fatal, text),) = found(compiled(tmp_path, "b4_eager"), engine_args=args)
    assert is_fatal is fatal
    assert re.search(words, text), text


@pytest.mark.parametrize(
    "args", ["-tp 1", "--max-num-batched-tokens 128", "--max-num-seqs 4", "--max-model-len=512"]
)
def test_settings_that_agree_are_not_mentioned(tmp_path: Path, args: str) -> None:
    assert found(compiled(tmp_path, "b4_eager"), engine_args=args) == []


def test_the_watchdog_is_longer_than_the_runtimes_own(tmp_path: Path) -> None:
    folder = compiled(tmp_path, "b4_eager")
    ((fatal, text),) = found(folder, stall_timeout_s=60)
    assert not fatal and "WARMQ_STALL_TIMEOUT_S=60" in text
    assert found(folder, stall_timeout_s=61) == []


@pytest.mark.parametrize(
    ("versions", "rebel", "fatal", "words"),
    [
        ({"vllm-rbln": "0.12.0"}, False, True, "import vllm.*rebel-compiler==0.12"),
        ({"vllm-rbln": "0.12.0"}, True, False, "emulated"),
        (SDK_0_12 | {"rebel-compiler": "0.11.2"}, True, True, "rebel-compiler 0.11.2"),
        (SDK_0_12 | {"optimum-rbln": "0.13.0"}, True, True, "optimum-rbln 0.13.0"),
        ({}, False, True, "vllm-rbln is not installed"),
    ],
)
def test_packages_that_do_not_fit(
    tmp_path: Path, versions: dict[str, str], rebel: bool, fatal: bool, words: str
) -> None:
    judged = found(compiled(tmp_path, "b4_eager"), versions, rebel)
    assert any(f is fatal and re.search(words, text) for f, text in judged), judged


@pytest.mark.parametrize(
    ("made", "have", "fatal"),
    [("0.11.0", "0.12.0", False), ("0.10.4", "0.12.0", True), ("0.9.3", "0.10.0", False)],
)
def test_artefacts_of_other_releases(tmp_path: Path, made: str, have: str, fatal: bool) -> None:
    folder = compiled(tmp_path, {"batch_size": 4, "max_seq_len": 512, "optimum_rbln_version": made})
    sdk = {"vllm-rbln": have, "optimum-rbln": have, "rebel-compiler": have}
    assert (fatal, f"was compiled by optimum-rbln {made}") in [
        (f, text.split("; ")[0].removeprefix(f"{folder} ")) for f, text in found(folder, sdk)
    ]


def test_legacy_incomplete_and_one_at_a_time(tmp_path: Path) -> None:
    old = {"_meta": {"version": "0.1.13"}, "batch_size": 1, "max_seq_len": 512}
    texts = "\n".join(text for _, text in found(compiled(tmp_path / "old", old)))
    assert "not read any more" in texts
    assert "one request at a time" in texts and "--batch-size 4" in texts
    ((fatal, text),) = found(compiled(tmp_path / "cut", "b4_eager", files=False))
    assert fatal and "lacks prefill.rbln, decoder_batch_4.rbln" in text


def test_options_are_seen_in_every_spelling() -> None:
    assert EngineArgs("--max_num_seqs=8 -tp 2 --enforce-eager --seed -1").options == {
        "max-num-seqs": "8", "tensor-parallel-size": "2", "enforce-eager": "", "seed": "-1",
    }  # fmt: skip


def test_releases_are_compared_as_numbers() -> None:
    assert release_of("0.11.2.post1") == (0, 11, 2)
    assert release_of("0.30.0+cpu") < release_of("0.30.1")
    assert release_of("odd") == ()


# -- prepare: what is done before vLLM is imported ----------------------------------


@pytest.fixture
def clean_env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RBLN_VISIBLE_DEVICES", "RBLN_DEVICES", ASK_FIRST_ENV):
        monkeypatch.setenv(name, "")  # so that it is put back, also if it was not there
        monkeypatch.delenv(name)
    return monkeypatch


def install(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], rebel: bool = True) -> None:
    monkeypatch.setattr(rules, "installed", lambda: Packages(versions, rebel))


def test_other_models_are_left_alone(clean_env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(clean_env, {"vllm": "0.30.0"}, rebel=False)
    asked = settings(tmp_path, rbln_devices="1")
    assert rules.prepare(asked) is asked
    assert "RBLN_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize(
    ("env", "wanted", "version", "visible", "old"),
    [
        ({}, "2,3", "0.12.0", "2,3", None),
        ({"RBLN_DEVICES": "1"}, None, "0.12.0", "1", None),
        ({"RBLN_VISIBLE_DEVICES": "0"}, "1", "0.12.0", "1", None),
        ({"RBLN_VISIBLE_DEVICES": "0"}, "1", "0.11.2", None, "1"),
        ({}, None, "0.12.0", None, None),
    ],
)
def test_devices_are_chosen_in_the_variable_that_the_release_reads(
    clean_env: pytest.MonkeyPatch, tmp_path: Path, env: dict[str, str], wanted: str | None,
    version: str, visible: str | None, old: str | None,
) -> None:  # fmt: skip
    install(clean_env, {"vllm-rbln": version, "rebel-compiler": version})
    for name, value in env.items():
        clean_env.setenv(name, value)
    rules.prepare(settings(compiled(tmp_path, "b4_eager"), rbln_devices=wanted))
    assert os.environ.get("RBLN_VISIBLE_DEVICES") == visible
    assert os.environ.get("RBLN_DEVICES") == old


def test_an_engine_on_rbln_is_asked_for_long_before_it_is_killed(
    clean_env: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(clean_env, SDK_0_12)
    folder = compiled(tmp_path, "b4_eager")
    assert rules.prepare(settings(folder)).kill_grace_s == 120
    assert os.environ[ASK_FIRST_ENV] == "120"
    assert rules.prepare(settings(folder, kill_grace_s=3)).kill_grace_s == 3


def test_values_are_passed_by_hand_where_the_release_wants_it(
    clean_env: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(clean_env, {"vllm-rbln": "0.9.1", "rebel-compiler": "0.9.1"})
    ready = rules.prepare(settings(compiled(tmp_path, "b4_eager"), engine_args="--seed 1"))
    assert ready.engine_args.startswith("--seed 1 --max-num-seqs 4 --max-model-len 512")


def test_all_that_is_wrong_is_said_at_once_and_nothing_is_imported(
    clean_env: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(clean_env, {"vllm-rbln": "0.12.0"}, rebel=False)
    folder = compiled(tmp_path, "b4_eager", files=False)
    with pytest.raises(SettingsError) as error:
        make_engine(settings(folder, engine_args="--device rbln"))
    for words in ("No module named 'rebel'", "lacks prefill.rbln", "--device is refused"):
        assert words in str(error.value)
    assert "RBLN_VISIBLE_DEVICES" not in os.environ


def test_without_rebel_no_model_can_be_served(clean_env: pytest.MonkeyPatch) -> None:
    install(clean_env, {"vllm-rbln": "0.12.0"}, rebel=False)
    with pytest.raises(SettingsError, match="uninstall vllm-rbln"):
        make_engine(settings("models/tiny"))
