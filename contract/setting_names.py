"""Checks names of settings: a misspelt name is refused instead of ignored.

One environment, `.env` or `warmq.toml` may serve producers, workers and gateways, so each of them
must know all names. A worker and a gateway may not import each other's code, so the names are
listed here; a test compares them with the settings classes.

A producer does not know the settings of engines from other distributions. So only a worker, which
knows every setting of its engine, refuses a name that is not similar to a known one. Names that
begin with an installed engine's name are never refused.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import entry_points

from contract.naming import nearest

#: The first characters of the names of settings in the environment.
PREFIX = "WARMQ_"
#: The group of entry points in which other distributions name their engines.
ENGINE_GROUP = "warmq.engines"

#: The settings that only workers read, among them those of all engines of this repository.
WORKER_SETTINGS = frozenset(
    """
    engine model models swap_drain_s served_model_name default_max_tokens look_ahead known_answers
    lease_s max_deaths stall_timeout_s rebuild_tries heartbeat_file front_ends metrics_port
    engine_args engine_log kill_grace_s media_private_networks adapters rbln_devices
    remote_wait_s openai_base_urls openai_api_key openai_concurrency openai_health_path
    openai_shared_with openai_ttft_ms openai_itl_ms
    triton_url triton_model
    simulated_slots simulated_tests
""".split()
)
#: The settings that only gateways read.
GATEWAY_SETTINGS = frozenset(
    """
    gateway_host gateway_port gateway_store gateway_max_file_bytes
    gateway_max_requests gateway_batch_runner gateway_models gateway_not_loaded
    gateway_online_timeout_s
""".split()
)
#: The settings that workers and gateways read.
WORKER_AND_GATEWAY_SETTINGS = frozenset({"drain_timeout_s", "gateway_private_webhooks"})
_FIXED = "is fixed now; remove it"
_OF_TESTS = "set it in WARMQ_SIMULATED_TESTS, one JSON object"
#: Removed settings of 0.2.0, each with text that names its replacement.
REMOVED_SETTINGS = {
    "pop_bytes": f"a POP takes 2 MiB, which {_FIXED}",
    "max_in_flight": "a worker takes max_num_seqs + WARMQ_LOOK_AHEAD; set --max-num-seqs in "
    "WARMQ_ENGINE_ARGS, or WARMQ_OPENAI_CONCURRENCY",
    "max_in_flight_bytes": f"a worker holds 256 MiB of messages, which {_FIXED}",
    "engine_stats_s": "set vLLM's own VLLM_LOG_STATS_INTERVAL",
    "task_events_per_s": f"task events cover 50 requests a second, which {_FIXED}",
    "metrics_host": "write the address into WARMQ_METRICS_PORT, for example 127.0.0.1:9100",
    "triton_slots": "set WARMQ_MAX_NUM_SEQS in the parameters of the server's config.pbtxt",
    "simulated_step_s": _OF_TESTS,
    "simulated_latency_s": _OF_TESTS,
    "simulated_log": _OF_TESTS,
    "simulated_build_s": _OF_TESTS,
    "simulated_fate": "set `behavior` in WARMQ_SIMULATED_TESTS, one JSON object",
    "simulated_process": _OF_TESTS,
    "gateway_max_body_bytes": "a body may have twice WARMQ_MAX_LINE_BYTES; set that",
    "gateway_drain_s": "set WARMQ_DRAIN_TIMEOUT_S, which gateways read, too",
    "gateway_lease_s": f"a gateway's work is taken over after 6 s, which {_FIXED}",
    "gateway_carries": "set WARMQ_GATEWAY_BATCH_RUNNER, its new name",
    "rbln_timeout_s": "set WARMQ_STALL_TIMEOUT_S above the runtime's limit of 60 s",
    "gateway_connections": "a gateway takes 20,000 connections, or as many as `ulimit -n` allows",
}
#: Variables that are not settings: the TOML file's name, those that a worker passes to its engine's
#: processes, and those that the files of compose/ use.
OTHER_VARIABLES = frozenset(
    """
    config engine_errors ask_first_s
    redis_password models_folder model_folder compiled compiled_out originals
""".split()
)
#: The first characters of variables for the tests of this repository.
TEST_PREFIX = "test_"
#: Names of variables that Kubernetes sets for each Service, for example
#: WARMQ_REDIS_SERVICE_HOST for a Service warmq-redis.
SERVICE_LINK = re.compile(r"(.+_)?(service_(host|port(_.+)?)|port_\d+_(tcp|udp|sctp)(_[a-z]+)?)")
#: Another name that Kubernetes sets for a Service. If a person has set it, its value does not begin
#: with SERVICE_ADDRESS.
SERVICE_PORT, SERVICE_ADDRESS = re.compile(r"(.+_)?port"), re.compile(r"(tcp|udp|sctp)://")
#: The least ratio of difflib between a wrong name and the name that a message suggests.
SIMILARITY = 0.7


def misspelt_variables(
    given: Mapping[str, str | None], known: Collection[str], *, all_known: bool
) -> Iterator[str]:
    """Yield a message for each variable that would be ignored.

    Args:
        given: values by lower-case name; only names with PREFIX and a non-empty value count.
        known: the settings of the calling program, without PREFIX.
        all_known: also refuse names that are not similar to a known one.
    """
    for variable, value in sorted(given.items()):
        name = variable.lower().removeprefix(PREFIX.lower())
        if name == variable.lower() or not value or name in OTHER_VARIABLES:
            continue
        if name.startswith(TEST_PREFIX) or SERVICE_LINK.fullmatch(name):
            continue
        if SERVICE_PORT.fullmatch(name) and SERVICE_ADDRESS.match(value):
            continue
        near = _suggestion(name, known, all_known=all_known)
        if near is not None:
            yield _refusal(variable.upper(), name, PREFIX + near.upper() if near else "", "unset")


def misspelt_keys(
    given: Mapping[str, object], known: Collection[str], *, all_known: bool
) -> Iterator[str]:
    """Yield a message for each key or section of a TOML file that would be ignored."""
    for key, value in given.items():
        is_section = isinstance(value, dict)
        near = _suggestion(key, known, all_known=all_known or is_section)
        if near is None:
            continue
        if is_section and key not in REMOVED_SETTINGS:
            yield f"[{key}] is a section, which is not allowed; write its keys above all sections"
        else:
            yield _refusal(key, key, near, "remove")


def _suggestion(name: str, known: Collection[str], *, all_known: bool) -> str | None:
    """Return None if a name is right, else the most similar known name, '' if none is similar.

    A name that is not similar to a known one counts as right if `all_known` is false.
    """
    if name in REMOVED_SETTINGS:
        return ""
    names = WORKER_SETTINGS.union(GATEWAY_SETTINGS, WORKER_AND_GATEWAY_SETTINGS, known)
    if name in names or name.startswith(_engine_prefixes()):
        return None
    near = nearest(name.lower().removeprefix(PREFIX.lower()), sorted(names), SIMILARITY)
    return near if near or all_known else None


def _engine_prefixes() -> tuple[str, ...]:
    found = entry_points(group=ENGINE_GROUP).names
    return tuple(re.sub(r"\W", "_", name).lower() + "_" for name in found)


def _refusal(shown: str, name: str, near: str, verb: str) -> str:
    if name in REMOVED_SETTINGS:
        return f"{shown} is no longer a setting: {REMOVED_SETTINGS[name]}"
    if near:
        return f"{shown} is not a setting; did you mean {near}?"
    return f"{shown} is not a setting of warmq; see docs/reference/settings.md, or {verb} it"
