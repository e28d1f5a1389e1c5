"""Any value of any setting ends in a sentence that names it, or in a start that can be used."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.engines.setting_bounds import BOUNDS, ENGINE_OF, NAMES

from contract.redis.connect import connect, connect_async
from contract.settings import Settings, SettingsError, load
from worker.engine.catalogue import load_settings, make_engine
from worker.engine.openai import OpenAISettings
from worker.engine.openai.engine import OpenAIEngine
from worker.engine.vllm_settings import VllmSettings
from worker.process.broker import celery_settings
from worker.settings import WorkerSettings

#: What Redis counts in: milliseconds since 1970 in 64 bits, through Lua's doubles.
LUA_EXACT = 2**53
ENGINES = ("vllm", "openai", "triton", "simulated")
#: What the engine needs so that nothing but the setting itself can be wrong.
VALID = {
    "WARMQ_MODEL": "models/tiny", "WARMQ_OPENAI_BASE_URLS": "http://127.0.0.1:1/v1",
}  # fmt: skip

NUMBERS = st.one_of(
    st.sampled_from(["inf", "-inf", "nan", "Infinity", "1e400", "1e308", "-1", "0", "-0", "0.0",
                     "1e-320", "5e-324", "0x10", "1_000", "9" * 30, "9" * 5000, "1e30", "٣", "½"]),
    st.integers().map(str), st.floats().map(str),
)  # fmt: skip
TEXTS = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    st.text("'\"\\ -=ab", max_size=12),
    st.sampled_from(["", " ", "'", '"', "a'b", "\\", "-x", "--", "\x06\x16", "\n", "a\tb", "\x7f",
                     "\u200b", "a" * 5000, "true", "None", "{}", "[]", "ü" * 300, ",", "/", "..",
                     "warmq:leases", "warmq-control", "0,1", "0,,1", "simulate:sleep=x"]),
)  # fmt: skip
URLS = st.builds(
    "".join,
    st.tuples(
        st.sampled_from(["redis://", "rediss://", "unix://", "sentinel://", "http://", "https://",
                         "grpcs://", ""]),
        st.sampled_from(["", "u:p@", ":p@", "u@", "[::1]", "[", "a..b", "h" * 70, "h", "ü", "h,g"]),
        st.sampled_from(["", "h", ":", ":1", ":0", ":65536", ":x", ":٣", ":-1", ",h:1", ":1,h:2"]),
        st.sampled_from(["", "/", "/0", "/x", "/-1", "/1/2", "/%zz", "#", "/ /", "/v1"]),
        st.sampled_from(["", "?", "?db=x", "?db=1", "?socket_timeout=x", "?socket_timeout=nan",
                         "?socket_timeout=-1", "?foo=1", "?retry=1", "?ssl_cert_reqs=x",
                         "?master=", "?max_connections=-1", "?protocol=9", "?ssl_keyfile=x"]),
    ),
)  # fmt: skip
VALUES = st.one_of(NUMBERS, TEXTS, URLS)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set only these of the project's variables."""
    before = {k: v for k, v in os.environ.items() if k.startswith("WARMQ_")}
    for name in before:
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


@pytest.fixture(scope="module", autouse=True)
def empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run where no .env and no TOML file is."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("empty"))
    yield
    os.chdir(before)


def use(found: WorkerSettings) -> None:
    """Compute what the worker computes of its settings, and give it to what takes it."""
    for milliseconds in (found.result_ttl_ms, found.lease_ms):
        assert 0 < milliseconds < LUA_EXACT
    assert found.queue_to_drain.encode().decode() == found.queue_to_drain
    assert 0 < found.redis_timeout_s < math.inf
    for name in type(found).model_fields:
        value = getattr(found, name)
        if isinstance(value, float):
            assert math.isfinite(value)
        elif isinstance(value, int):
            assert value < LUA_EXACT
    url = found.redis_url.get_secret_value()
    connect(url, "fuzz").connection_pool.make_connection()
    connect_async(url, "fuzz").connection_pool.make_connection()
    celery_settings(url)
    if isinstance(found, VllmSettings):
        assert len(found.engine_args.options) <= len(found.engine_args.words)
    if isinstance(found, OpenAISettings):
        assert isinstance(make_engine(found), OpenAIEngine)
        found.openai_api_key.get_secret_value().encode("ascii")
    json.dumps(found.model_dump(mode="json"))


def start_or_sentence(variables: dict[str, str], name: str) -> None:
    with environment(**variables):
        try:
            found = load_settings()
        except SettingsError as error:
            assert error.message.startswith(f"WARMQ_{name.upper()}: "), error.message
            assert len(error.message) > len(name) + 20
            return
        use(found)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(value=VALUES, engine=st.sampled_from(ENGINES))
def test_any_value_is_a_sentence_or_a_start(name: str, value: str, engine: str) -> None:
    given = VALID | {"WARMQ_ENGINE": ENGINE_OF.get(name, engine)} | {f"WARMQ_{name.upper()}": value}
    start_or_sentence(given, name)


@settings(max_examples=300, deadline=None)
@given(url=URLS)
def test_any_redis_url_is_a_sentence_or_a_start(url: str) -> None:
    start_or_sentence(VALID | {"WARMQ_REDIS_URL": url}, "redis_url")


@settings(max_examples=300, deadline=None)
@given(urls=URLS)
def test_any_address_of_a_server_is_a_sentence_or_a_start(urls: str) -> None:
    for engine in ("openai", "triton"):
        name = "openai_base_urls" if engine == "openai" else "triton_url"
        given = VALID | {"WARMQ_ENGINE": engine} | {f"WARMQ_{name.upper()}": urls}
        start_or_sentence(given, name)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_that_are_no_text_are_a_sentence_or_a_start(name: str) -> None:
    engine = ENGINE_OF.get(name, "simulated")
    given = VALID | {"WARMQ_ENGINE": engine, f"WARMQ_{name.upper()}": "a\udcff"}
    start_or_sentence(given, name)


@pytest.mark.parametrize("name", BOUNDS)
def test_every_number_has_bounds_that_python_and_redis_can_take(name: str) -> None:
    for value in BOUNDS[name]:
        engine = ENGINE_OF.get(name, "vllm")
        given = VALID | {"WARMQ_ENGINE": engine, f"WARMQ_{name.upper()}": str(value)}
        with environment(**given):
            use(load_settings())
            if name.endswith("_s"):
                loop = asyncio.new_event_loop()
                loop.call_later(value, lambda: None).cancel()
                loop.close()


@settings(max_examples=200, deadline=None)
@given(
    text=st.one_of(
        st.binary(), TEXTS.map(str.encode),
        st.builds(lambda n, v: f"WARMQ_{n.upper()}={v}\n".encode(), st.sampled_from(NAMES), VALUES),
        st.builds(lambda n, v: f"{n} = {v}\n".encode(), st.sampled_from(NAMES), VALUES),
        st.builds(
            lambda n, v: f"{n} = {json.dumps(v)}\n".encode(), st.sampled_from(NAMES),
            st.one_of(VALUES, st.text(), st.integers(), st.booleans(), st.lists(st.integers())),
        ),
    ),
    name=st.sampled_from([".env", "warmq.toml"]),
    engine=st.sampled_from(ENGINES),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_any_file_of_settings_is_a_sentence_or_a_start(text: bytes, name: str, engine: str) -> None:
    Path(name).write_bytes(text)
    try:
        with environment(**VALID | {"WARMQ_ENGINE": engine}):
            use(load_settings())
    except SettingsError as error:
        assert error.message.startswith(("WARMQ_", name)), error.message
    finally:
        Path(name).unlink()


@pytest.mark.parametrize(
    "text",
    ["queue = \n", "queue = 2026-13-45", "queue = " + "9" * 5000, "queue = " + "[" * 5000],
    ids=["no value", "no date", "no number", "no end"],
)
def test_a_broken_toml_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with (
        environment(WARMQ_CONFIG=str(file)),
        pytest.raises(SettingsError, match=r"mine\.toml cannot be read"),
    ):
        load(Settings)


def test_a_toml_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for missing in (tmp_path / "none.toml", tmp_path, "x" * 5000):
        with environment(WARMQ_CONFIG=str(missing)):
            with pytest.raises(SettingsError, match=r"WARMQ_CONFIG: .* is not a file") as caught:
                load(Settings)
            assert "name a TOML file" in caught.value.message


def test_a_secret_is_in_no_sentence() -> None:
    for name, value in (
        ("REDIS_URL", "redis://:s3cret@host:99999/0"),
        ("OPENAI_API_KEY", "s3cret\n"),
        ("OPENAI_BASE_URLS", "http://s3cret:x/v1"),
    ):
        with environment(**VALID | {"WARMQ_ENGINE": "openai", f"WARMQ_{name}": value}):
            with pytest.raises(SettingsError) as caught:
                load_settings()
            assert "s3cret" not in caught.value.message
