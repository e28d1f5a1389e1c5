"""A name that is no setting is refused with the one that was meant, on each side."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from kit.engines.setting_bounds import NAMES

from contract.setting_names import (
    GATEWAY_SETTINGS,
    OTHER_VARIABLES,
    REMOVED_SETTINGS,
    WORKER_AND_GATEWAY_SETTINGS,
    WORKER_SETTINGS,
)
from contract.settings import Settings, SettingsError, load
from demo.stack import ROOT
from gateway.settings import GatewaySettings
from worker.engine.catalogue import BUILT_IN, load_settings

#: A name in the environment, and what is said of it.
MISSPELT = [
    ("WARMQ_MODLE", "WARMQ_MODLE is not a setting; did you mean WARMQ_MODEL?"),
    ("WARMQ_MODELES", "WARMQ_MODELES is not a setting; did you mean WARMQ_MODELS?"),
    ("WARMQ_REDIS_ULR", "WARMQ_REDIS_ULR is not a setting; did you mean WARMQ_REDIS_URL?"),
    ("warmq_lease_sec", "WARMQ_LEASE_SEC is not a setting; did you mean WARMQ_LEASE_S?"),
    ("WARMQ_TRITON_URLS", "did you mean WARMQ_TRITON_URL?"),
]
#: What Kubernetes tells a pod about the Services warmq-redis and warmq.
SERVICE_LINKS = {
    "WARMQ_REDIS_SERVICE_HOST": "10.0.0.7",
    "WARMQ_REDIS_SERVICE_PORT": "6379",
    "WARMQ_REDIS_SERVICE_PORT_REDIS": "6379",
    "WARMQ_REDIS_PORT": "tcp://10.0.0.7:6379",
    "WARMQ_REDIS_PORT_6379_TCP": "tcp://10.0.0.7:6379",
    "WARMQ_REDIS_PORT_6379_TCP_PROTO": "tcp",
    "WARMQ_REDIS_PORT_6379_TCP_PORT": "6379",
    "WARMQ_REDIS_PORT_6379_TCP_ADDR": "10.0.0.7",
    "WARMQ_SERVICE_HOST": "10.0.0.8",
    "WARMQ_PORT": "udp://10.0.0.8:1",
}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run a simulated worker in an empty folder, without any other WARMQ_ variable."""
    for name in os.environ:
        if name.upper().startswith("WARMQ_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WARMQ_ENGINE", "simulated")


def refusal(side: str) -> str:
    """Return what one side says of its settings."""
    with pytest.raises(SettingsError) as caught:
        load(Settings) if side == "producer" else load_settings()
    return caught.value.message


def accepted() -> None:
    """Both sides start."""
    load(Settings)
    load_settings()


def test_the_contract_lists_every_setting_of_every_engine() -> None:
    assert WORKER_SETTINGS | WORKER_AND_GATEWAY_SETTINGS | Settings.model_fields.keys() == set(
        NAMES
    )
    assert not WORKER_SETTINGS & Settings.model_fields.keys()


def test_the_contract_lists_every_setting_of_a_gateway() -> None:
    own = GatewaySettings.model_fields.keys() - Settings.model_fields.keys()
    assert own == GATEWAY_SETTINGS | WORKER_AND_GATEWAY_SETTINGS


def test_a_setting_more_is_for_a_feature_more() -> None:
    # 45, and WARMQ_MODELS with two more, WARMQ_ADAPTERS, and three for a server that people use.
    names = (
        WORKER_SETTINGS
        | WORKER_AND_GATEWAY_SETTINGS
        | GATEWAY_SETTINGS
        | Settings.model_fields.keys()
    )
    assert len(names) <= 52 and not names & REMOVED_SETTINGS.keys()


@pytest.mark.parametrize("side", ["producer", "worker"])
@pytest.mark.parametrize("name", REMOVED_SETTINGS)
def test_a_setting_that_is_gone_is_refused_with_what_holds_in_its_place(
    monkeypatch: pytest.MonkeyPatch, name: str, side: str
) -> None:
    monkeypatch.setenv(f"WARMQ_{name.upper()}", "1")
    assert refusal(side) == f"WARMQ_{name.upper()} is no longer a setting: {REMOVED_SETTINGS[name]}"
    monkeypatch.delenv(f"WARMQ_{name.upper()}")
    Path("warmq.toml").write_text(f"{name} = 1\n")
    assert refusal(side) == f"warmq.toml: {name} is no longer a setting: {REMOVED_SETTINGS[name]}"


def test_what_the_compose_files_are_filled_in_with_is_listed() -> None:
    texts = "".join(path.read_text() for path in (ROOT / "compose").glob("*.yaml"))
    names = {name.lower() for name in re.findall(r"\$\{WARMQ_([A-Z0-9_]+)", texts)}
    assert "redis_password" in names
    assert (
        names
        <= OTHER_VARIABLES
        | WORKER_AND_GATEWAY_SETTINGS
        | WORKER_SETTINGS
        | GATEWAY_SETTINGS
        | Settings.model_fields.keys()
    )


@pytest.mark.parametrize("side", ["producer", "worker"])
@pytest.mark.parametrize(("name", "told"), MISSPELT)
def test_a_misspelt_variable_is_refused_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, name: str, told: str, side: str
) -> None:
    monkeypatch.setenv(name, "1")
    assert told in refusal(side)


@pytest.mark.parametrize("side", ["producer", "worker"])
def test_every_misspelt_name_is_told_at_once_and_no_value(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, side: str
) -> None:
    monkeypatch.setenv("WARMQ_OPENAI_API_KYE", "s3cret")
    (tmp_path / ".env").write_text("WARMQ_QUEU=s3cret\nOTHER=1\nWARMQ_CONFIG=x.toml\n")
    (tmp_path / "warmq.toml").write_text('WARMQ_MODEL = "s3cret"\nleases = 1\n[redis]\nurl = "a"\n')
    assert refusal(side).splitlines() == [
        "WARMQ_OPENAI_API_KYE is not a setting; did you mean WARMQ_OPENAI_API_KEY?",
        ".env: WARMQ_QUEU is not a setting; did you mean WARMQ_QUEUE?",
        ".env: WARMQ_CONFIG is read from the environment only; set it there",
        "warmq.toml: WARMQ_MODEL is not a setting; did you mean model?",
        "warmq.toml: leases is not a setting; did you mean lease_s?",
        "warmq.toml: [redis] is a section, which is not allowed; write its keys above all sections",
    ]


def test_a_name_that_is_like_no_setting_is_refused_by_a_worker_and_may_be_an_engines_to_a_producer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WARMQ_XYZ", "1")
    load(Settings)
    assert refusal("worker").startswith("WARMQ_XYZ is not a setting of warmq; see docs/")


def test_a_variable_without_a_value_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMQ_MODLE", "")
    accepted()


@pytest.mark.parametrize("engine", BUILT_IN)
def test_settings_of_all_engines_may_be_set_whichever_runs(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    given = {
        "engine": engine, "model": "m", "engine_args": "-tp 2", "triton_url": "host:8001",
        "openai_base_urls": "http://host/v1", "simulated_slots": "7", "queue": "q",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(f"WARMQ_{name.upper()}", value)
    accepted()
    for name in given:
        monkeypatch.delenv(f"WARMQ_{name.upper()}")
    Path("warmq.toml").write_text("".join(f'{k} = "{v}"\n' for k, v in given.items()))
    accepted()


def test_what_kubernetes_tells_about_services_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SERVICE_LINKS.items():
        monkeypatch.setenv(name, value)
    accepted()


def test_a_port_that_a_person_sets_is_no_link_of_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMQ_REDIS_PORT", "6379")
    assert "WARMQ_REDIS_PORT is not a setting; did you mean WARMQ_REDIS_URL?" in refusal("producer")


def test_variables_that_are_read_elsewhere_stop_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*OTHER_VARIABLES - {"config"}, "test_redis_server", "test_anything"):
        monkeypatch.setenv(f"WARMQ_{name.upper()}", "1")
    accepted()


def test_an_engine_of_another_distribution_brings_its_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WARMQ_MY_ENGINE_URL", "1")
    assert "not a setting" in refusal("worker")
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[warmq.engines]\nmy-engine = my_engine:ENGINE\n")
    (tmp_path / "my_engine.py").write_text(
        "from worker.engine.simulated import ENGINE as E, SimulatedSettings as S\n"
        "class Mine(S):\n    color: str = 'red'\n"
        "ENGINE = type(E)(Mine, E.make)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    accepted()  # whichever engine runs: the name begins with an installed engine's
    monkeypatch.setenv("WARMQ_ENGINE", "my-engine")
    monkeypatch.setenv("WARMQ_COLOR", "blue")
    assert load_settings().model_dump()["color"] == "blue"
    monkeypatch.setenv("WARMQ_COLOUR", "blue")
    assert "did you mean WARMQ_COLOR?" in refusal("worker")


def test_a_broken_toml_file_is_named_whether_it_was_asked_for_or_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "warmq.toml").write_text("queue = ")
    assert refusal("producer").startswith("warmq.toml cannot be read as TOML: ")
    monkeypatch.setenv("WARMQ_CONFIG", "mine.toml")
    assert refusal("producer").startswith("WARMQ_CONFIG: 'mine.toml' is not a file; name a TOML")
