"""Which names of settings there are, so that a misspelt one is refused and not ignored.

One environment, `.env` or `warmq.toml` may serve producers and workers, so each side knows the
names of both. A side loads none of the other's code: the names are listed here, and a test compares
them with every settings class.

An engine of another distribution brings settings that a producer cannot know, least of all where
only the workers have it. So what is near no known name is refused by workers alone, which know
every setting of the engine that they run; names that begin with an installed engine's own are
never refused.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import entry_points

from contract.naming import nearest

PREFIX = "WARMQ_"
#: Other distributions name their engines in this group of entry points.
ENGINE_GROUP = "warmq.engines"

#: What only workers read: every setting of this repository's engines.
WORKER_SETTINGS = frozenset(
    """
    engine model served_model_name default_max_tokens look_ahead
    lease_s max_deaths stall_timeout_s rebuild_tries heartbeat_file front_ends metrics_port
    engine_args kill_grace_s media_private_networks rbln_devices rbln_timeout_s
    remote_wait_s openai_base_urls openai_api_key openai_concurrency openai_health_path
    triton_url triton_model
    simulated_slots simulated_latency_s simulated_tests
""".split()
)
#: What only gateways read.
GATEWAY_SETTINGS = frozenset(
    """
    gateway_host gateway_port gateway_store gateway_max_file_bytes
    gateway_max_requests gateway_batch_runner gateway_models gateway_online_timeout_s
    gateway_private_webhooks
""".split()
)
#: What workers and gateways read, each with a default of its own.
WORKER_AND_GATEWAY_SETTINGS = frozenset({"drain_timeout_s"})
#: Settings of 0.2.0 that are gone, and what holds in their place.
_CHOSEN = "nobody could choose it better; remove it"
_OF_TESTS = "WARMQ_SIMULATED_TESTS has it, in one JSON object"
REMOVED_SETTINGS = {
    "pop_bytes": f"a POP takes 2 MiB; {_CHOSEN}",
    "max_in_flight": "a worker takes max_num_seqs + WARMQ_LOOK_AHEAD; set --max-num-seqs in "
    "WARMQ_ENGINE_ARGS, or WARMQ_OPENAI_CONCURRENCY",
    "max_in_flight_bytes": f"a worker holds 256 MiB of messages; {_CHOSEN}",
    "engine_stats_s": "vLLM's own variable says it: VLLM_LOG_STATS_INTERVAL",
    "task_events_per_s": f"task events tell of 50 requests a second; {_CHOSEN}",
    "metrics_host": "write the address into WARMQ_METRICS_PORT, as 127.0.0.1:9100",
    "triton_slots": "the server's config.pbtxt says it, as WARMQ_MAX_NUM_SEQS in its parameters",
    "simulated_step_s": _OF_TESTS,
    "simulated_log": _OF_TESTS,
    "simulated_build_s": _OF_TESTS,
    "simulated_fate": _OF_TESTS,
    "simulated_process": _OF_TESTS,
    "gateway_max_body_bytes": "a body may have twice WARMQ_MAX_LINE_BYTES; set that",
    "gateway_drain_s": "WARMQ_DRAIN_TIMEOUT_S says it for gateways, too",
    "gateway_lease_s": f"a gateway's work is taken over after 6 s; {_CHOSEN}",
    "gateway_carries": "it has a new name: WARMQ_GATEWAY_BATCH_RUNNER",
    "gateway_connections": "a gateway takes 20,000 connections, or what `ulimit -n` allows",
}
#: Variables of the environment that are no settings: the TOML file's name, what a worker tells the
#: processes of its engine, and what the files in compose/ are filled in with.
OTHER_VARIABLES = frozenset(
    """
    config engine_errors ask_first_s
    redis_password models_folder model_folder compiled compiled_out originals
""".split()
)
#: What the tests of this repository are told.
TEST_PREFIX = "test_"
#: What Kubernetes tells every pod about each Service: warmq-redis gives WARMQ_REDIS_SERVICE_HOST.
SERVICE_LINK = re.compile(r"(.+_)?(service_(host|port(_.+)?)|port_\d+_(tcp|udp|sctp)(_[a-z]+)?)")
#: The one of those names that could be a person's is known by its value.
SERVICE_PORT, SERVICE_ADDRESS = re.compile(r"(.+_)?port"), re.compile(r"(tcp|udp|sctp)://")
#: How alike a name must be to be named as what was meant (difflib's ratio).
ALIKE = 0.7


def misspelt_variables(
    given: Mapping[str, str | None], known: Collection[str], *, all_known: bool
) -> Iterator[str]:
    """Yield a sentence for each variable that would be ignored.

    Args:
        given: values by lower-case name; only what begins with warmq_ is looked at, and what is
            empty counts as unset.
        known: names of this side's settings, without the prefix.
        all_known: whether what is near no known name is wrong too.
    """
    for variable, value in sorted(given.items()):
        name = variable.lower().removeprefix(PREFIX.lower())
        if name == variable.lower() or not value or name in OTHER_VARIABLES:
            continue
        if name.startswith(TEST_PREFIX) or SERVICE_LINK.fullmatch(name):
            continue
        if SERVICE_PORT.fullmatch(name) and SERVICE_ADDRESS.match(value):
            continue
        near = unknown(name, known, all_known=all_known)
        if name in REMOVED_SETTINGS:
            yield _gone(variable.upper(), name)
        elif near is not None:
            yield _sentence(variable.upper(), PREFIX + near.upper() if near else "", "unset it")


def misspelt_keys(
    given: Mapping[str, object], known: Collection[str], *, all_known: bool
) -> Iterator[str]:
    """Yield a sentence for each key or section of a TOML file that would be ignored."""
    for key, value in given.items():
        near = unknown(key, known, all_known=all_known or isinstance(value, dict))
        if key in REMOVED_SETTINGS:
            yield _gone(key, key)
        elif near is not None and isinstance(value, dict):
            yield f"[{key}] is a section, and there are none; write its keys above all sections"
        elif near is not None:
            yield _sentence(key, near, "remove it")


def unknown(name: str, known: Collection[str], *, all_known: bool) -> str | None:
    """Return the known name that is most like an unknown one, '' if none is; None if it is right.

    Also None for names of installed engines, and unless `all_known` for what is near no known name.
    """
    names = WORKER_SETTINGS.union(GATEWAY_SETTINGS, WORKER_AND_GATEWAY_SETTINGS, known)
    if name in names or name.startswith(_engines()):
        return None
    near = nearest(name.lower().removeprefix(PREFIX.lower()), sorted(names), ALIKE)
    return near if near or all_known else None


def _engines() -> tuple[str, ...]:
    found = entry_points(group=ENGINE_GROUP).names
    return tuple(re.sub(r"\W", "_", name).lower() + "_" for name in found)


def _gone(shown: str, name: str) -> str:
    return f"{shown} is no setting any more: {REMOVED_SETTINGS[name]}"


def _sentence(name: str, near: str, end: str) -> str:
    if near:
        return f"{name} is no setting; did you mean {near}?"
    return f"{name} is no setting of warmq, whose settings docs/reference/settings.md lists; {end}"
