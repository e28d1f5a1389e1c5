"""Settings: where they come from, and what a wrong one says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.engines.setting_bounds import ENGINE_OF

from contract.settings import Settings, SettingsError, load
from demo.stack import ROOT
from gateway.settings import GatewaySettings
from worker.engine.catalogue import load_settings
from worker.engine.vllm_settings import STATISTICS, statistics_every_s

BAD = [
    ("redis_url", "http://localhost", "must start with one of redis://"),
    ("redis_url", "http://localhost", "default redis://127.0.0.1:6379/0"),
    ("simulated_tests", '{"step_s": -1}', "step_s: Input should be greater"),
    ("served_model_name", "-", "default none)"),
    ("redis_url", "redis://host:99999/0", "Write redis://user:password@host:6379/0"),
    ("redis_url", "sentinel://host/0", "not a Redis URL"),
    ("redis_url", "redis:// host/0", "not a Redis URL"),
    ("redis_url", "redis://host/abc", "the database, behind the host and a /, must be a number"),
    ("redis_url", "redis:///abc", "must be a number"),
    ("redis_url", "redis://host/9999999999", "must be a number"),
    ("redis_url", "/abc", "must start with one of redis://"),
    ("redis_url", "/abc", "default redis://127.0.0.1:6379/0"),
    ("redis_url", "redis://h?decode_responses=True", "remove the option decode_responses"),
    ("redis_url", "rediss://h/1?ssl_check_hostname=0&encoding=cp949", "the option encoding"),
    ("redis_url", "unix:///s.sock?db=1&protocol=3", "remove the option protocol"),
    ("redis_url", "redis://h?client_name=작업자", "remove the option client_name"),
    ("redis_url", "redis://h?legacy_responses=no", "remove the option legacy_responses"),
    ("redis_url", "redis://h?retry_on_error=x", "remove the option retry_on_error"),
    ("redis_url", "sentinel://h:1/0?decode_responses=1", "the option decode_responses"),
    ("queue", "warmq:leases", "names of other keys"),
    ("queue", "a\x06b", "printable characters only"),
    ("result_ttl_s", "0", "default 604800"),
    ("result_ttl_s", "inf", "should be a finite number"),
    ("result_ttl_s", "1e300", "less than or equal to 315360000"),
    ("engine_args", "--x\x01", "must have printable characters only"),
    ("engine_args", "--max-num-seqs '7", "No closing quotation; write it as in a shell"),
    ("engine_args", "--max-num-seqs 7\\", "No escaped character"),
    ("served_model_name", "-x", "must not begin with -"),
    ("high_water", "1.5", "share of Redis's maxmemory"),
    ("max_line_bytes", "-1", "longest input line"),
    ("engine", "gpu", "'triton' or 'simulated'"),
    ("default_max_tokens", "0", "never unlimited"),
    ("look_ahead", "-1", "requests that wait inside the engine beyond max_num_seqs"),
    ("metrics_port", "none", "a port from 1 to 65535"),
    ("metrics_port", ":80", "an address before the colon"),
    ("lease_s", "1", "default 60"),
    ("max_deaths", "0", "engine deaths after which"),
    ("drain_timeout_s", "-5", "seconds after SIGTERM"),
    ("stall_timeout_s", "0", "counts as hung"),
    ("rebuild_tries", "x", "default 3"),
]


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run in an empty folder, without any WARMQ_ variable."""
    for name in os.environ:
        if name.startswith("WARMQ_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WARMQ_ENGINE", "simulated")


@pytest.mark.parametrize(("name", "value", "part"), BAD)
def test_a_wrong_value_names_the_variable_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, part: str
) -> None:
    monkeypatch.setenv("WARMQ_ENGINE", ENGINE_OF.get(name, "simulated"))
    monkeypatch.setenv("WARMQ_MODEL", "models/tiny")
    monkeypatch.setenv(f"WARMQ_{name.upper()}", value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert caught.value.message.startswith(f"WARMQ_{name.upper()}: ")
    assert part in caught.value.message


def test_every_wrong_value_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMQ_LEASE_S", "soon")
    monkeypatch.setenv("WARMQ_MAX_DEATHS", "-1")
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert [line.split(":")[0] for line in caught.value.message.splitlines()] == [
        "WARMQ_LEASE_S", "WARMQ_MAX_DEATHS",
    ]  # fmt: skip


@pytest.mark.parametrize("url", ["redis:/s3cret", "http://:s3cret@host:1/0", "s3cret"])
def test_no_secret_is_in_a_message_or_a_repr(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("WARMQ_REDIS_URL", url)
    with pytest.raises(SettingsError) as caught:
        load(Settings)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None
    monkeypatch.setenv("WARMQ_REDIS_URL", "redis://user:s3cret@host:1/0")
    assert "s3cret" not in repr(load(Settings))


def test_the_environment_wins_over_dotenv_and_that_over_toml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "warmq.toml").write_text('queue = "toml"\nlease_s = 11\nmax_deaths = 5\n')
    (tmp_path / ".env").write_text("WARMQ_QUEUE=dotenv\nWARMQ_LEASE_S=22\nOTHER=1\n")
    monkeypatch.setenv("WARMQ_QUEUE", "environment")
    settings = load_settings()
    assert (settings.queue, settings.lease_s, settings.max_deaths) == ("environment", 22, 5)


def test_another_toml_file_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("lease_s = 33\n")
    monkeypatch.setenv("WARMQ_CONFIG", str(tmp_path / "other.toml"))
    assert load_settings().lease_s == 33


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMQ_MODEL", "")
    monkeypatch.setenv("WARMQ_LOOK_AHEAD", "")
    settings = load_settings()
    assert (settings.model, settings.look_ahead) == (None, None)


def test_the_real_engine_needs_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMQ_ENGINE", "vllm")
    with pytest.raises(SettingsError, match="WARMQ_MODEL: name the model's folder"):
        load_settings()


def test_the_served_name_chooses_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().queue_to_drain == "warmq"
    monkeypatch.setenv("WARMQ_SERVED_MODEL_NAME", "tiny")
    assert load_settings().queue_to_drain == "warmq.tiny"


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(Settings).queue = "other"  # type: ignore[misc]


def test_an_engine_nobody_knows_is_refused_with_those_there_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WARMQ_ENGINE", "gpu")
    monkeypatch.setenv("WARMQ_LEASE_S", "soon")
    installed(tmp_path, "mine = nowhere_at_all:ENGINE")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SettingsError) as caught:
        load_settings()
    lines = caught.value.message.splitlines()
    assert [line.split(":")[0] for line in lines] == ["WARMQ_ENGINE", "WARMQ_LEASE_S"]
    assert "'vllm', 'openai', 'triton', 'simulated' or 'mine'" in lines[0]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("mine = nowhere_at_all:ENGINE", "nowhere_at_all:ENGINE, which cannot be imported"),
        ("mine = os.path:sep", "not an EngineSpec but '/'"),
    ],
)
def test_a_broken_engine_of_another_distribution_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, entry: str, words: str
) -> None:
    monkeypatch.setenv("WARMQ_ENGINE", "mine")
    installed(tmp_path, entry)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SettingsError, match="WARMQ_ENGINE: mine is ") as caught:
        load_settings()
    assert words in caught.value.message


def test_only_the_chosen_engine_is_imported() -> None:
    script = (
        "import sys; from worker.engine.catalogue import load_settings, make_engine; "
        "make_engine(load_settings(engine='openai', openai_base_urls='http://a/v1')); "
        "print([m for m in sys.modules if m.startswith(('vllm', 'torch', 'worker.engine.vllm', "
        "'worker.engine.simulated', 'worker.engine.triton', 'tritonclient'))])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True,
                          check=True)  # fmt: skip
    assert done.stdout == "[]\n"


def installed(folder: Path, entry: str) -> None:
    """Make a distribution with this entry point."""
    info = folder / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[warmq.engines]\n{entry}\n")


@pytest.mark.parametrize(
    ("value", "address"),
    [
        ("", None),
        ("9100", ("0.0.0.0", 9100)),
        ("127.0.0.1:9100", ("127.0.0.1", 9100)),
        ("[::1]:9100", ("::1", 9100)),
    ],
)
def test_metrics_are_served_on_a_port_or_on_an_address_too(
    monkeypatch: pytest.MonkeyPatch, value: str, address: tuple[str, int] | None
) -> None:
    monkeypatch.setenv("WARMQ_METRICS_PORT", value)
    assert load_settings().metrics_address == address
    if value.isdecimal():
        assert load_settings(metrics_port=int(value)).metrics_address == address


def test_an_address_that_kubernetes_sets_for_a_service_is_no_address_to_listen_on() -> None:
    with pytest.raises(SettingsError, match="WARMQ_METRICS_PORT"):
        load_settings(metrics_port="tcp://10.0.0.1:9100")


def test_a_worker_and_a_gateway_each_have_a_time_to_stop_in_unless_it_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (load_settings().drain_timeout_s, load(GatewaySettings).drain_timeout_s) == (25, 10)
    monkeypatch.setenv("WARMQ_DRAIN_TIMEOUT_S", "7")
    assert (load_settings().drain_timeout_s, load(GatewaySettings).drain_timeout_s) == (7, 7)


@pytest.mark.parametrize(("line", "body"), [(65536, 2**20), (10 * 2**20, 20 * 2**20)])
def test_bodies_hold_a_line_and_what_uploads_and_metadata_need(line: int, body: int) -> None:
    assert load(GatewaySettings, max_line_bytes=line).max_body_bytes == body


def test_vllms_statistics_are_logged_as_its_own_variable_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(STATISTICS, raising=False)
    assert statistics_every_s() is None
    monkeypatch.setenv(STATISTICS, "2.5")
    assert statistics_every_s() == 2.5
    for wrong in ("soon", "0", "-1", "inf", "nan"):
        monkeypatch.setenv(STATISTICS, wrong)
        with pytest.raises(SettingsError, match=STATISTICS):
            statistics_every_s()
