"""Defines the settings of every worker; contract/settings.py reads their values."""

from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from contract.naming import queue_name
from contract.redis.connect import SOCKET_TIMEOUT_S
from contract.settings import PRIVATE_WEBHOOKS, Count, Seconds, Settings, Text

#: The field of WARMQ_ENGINE, which is one of the names in worker/engine/catalogue.py.
ENGINE_FIELD = Field("vllm", description="vllm, openai, triton, simulated, or an installed engine")


def _checked_name(text: str) -> str:
    if text.startswith("-"):
        raise ValueError("must not begin with -, like an option")
    return text


def _checked_address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and len(port) < 6 and 1 <= int(port) <= 65535):
        raise ValueError("must be a port from 1 to 65535, or an address, a colon and a port")
    # For a Service warmq-metrics, Kubernetes sets WARMQ_METRICS_PORT to tcp://10.0.0.1:9100.
    if colon and (not host.strip("[]") or "/" in host):
        raise ValueError("must name an address before the colon, or the port alone")
    return text


Name = Annotated[Text, AfterValidator(_checked_name)]


class WorkerSettings(Settings):
    """The settings of a worker with any engine; each engine has a subclass with more.

    Names of times end in `_s`, and their values are seconds.
    """

    refuses_unknown_names: ClassVar[bool] = True
    #: Whether the engine requires the setting `model`; an engine's subclass may set it.
    needs_model: ClassVar[bool] = False

    engine: str = ENGINE_FIELD
    model: Name | None = Field(None, description="folder or hub name of the model")
    served_model_name: Name | None = Field(
        None,
        max_length=200,
        description="serve this name from the queue `<queue>.<name>` instead of `<queue>`",
    )
    models: Text | None = Field(
        None,
        description="several models, of which the worker loads one at a time, or some together, "
        "by what waits: a TOML file with a table [models.NAME] for each, or JSON",
    )
    default_max_tokens: int = Field(
        1024,
        ge=1,
        le=2**31 - 1,
        description="max_tokens of requests without it; never unlimited",
    )
    look_ahead: Count | None = Field(
        None,
        ge=0,
        description="requests that wait inside the engine beyond max_num_seqs, and start by "
        "priority; default max(8, max_num_seqs / 4), for a pooling model max(8, 2 × max_num_seqs)",
    )
    known_answers: Annotated[int, Field(le=10_000_000)] = Field(
        0,
        ge=0,
        description="most answers of a tenant that are noted for reuse; 200 bytes each",
    )
    front_ends: Count | None = Field(
        None,
        ge=1,
        le=64,
        description="processes that feed one engine; default 1, with data parallelism one "
        "for each replica, at most one for every 4 cores",
    )
    lease_s: Seconds = Field(
        60,
        ge=2,
        description="seconds until a dead worker's requests run elsewhere; from the next worker's "
        "start if none runs",
    )
    max_deaths: Count = Field(
        2, ge=1, description="engine deaths after which a request is run as a suspect"
    )
    drain_timeout_s: Seconds = Field(
        25,
        ge=0,
        description="seconds after SIGTERM in which running requests may end; the worker then "
        "hands them back",
    )
    swap_drain_s: Seconds = Field(
        30,
        ge=0,
        description="seconds in which running requests may end before a swap (WARMQ_MODELS); they "
        "are handed back earlier where that costs less",
    )
    stall_timeout_s: Seconds = Field(
        300,
        ge=0.1,
        description="time without an engine step, while requests run, after which the engine "
        "counts as hung; the same for a blocked event loop of the worker (at least 5 s)",
    )
    rebuild_tries: int = Field(
        3, ge=0, le=20, description="engine starts that may fail in a row before the worker exits"
    )
    # In a TOML file the port may be a number.
    metrics_port: Annotated[Text, BeforeValidator(str), AfterValidator(_checked_address)] | None = (
        Field(
            None,
            description="port of /metrics, or address and port, for example 127.0.0.1:9100; unset: "
            "not served",
        )
    )
    heartbeat_file: Text | None = Field(
        None,
        description="file to which the worker writes its state every second while its event loop "
        "runs",
    )

    gateway_private_webhooks: bool = PRIVATE_WEBHOOKS

    @model_validator(mode="after")
    def _model_is_named(self) -> Self:
        if self.models is not None:
            for name in ("model", "served_model_name", "front_ends", "adapters"):
                if getattr(self, name, None) is not None:
                    raise ValueError(
                        f"WARMQ_MODELS: it sets WARMQ_{name.upper()} for each model; unset that"
                    )
        elif self.needs_model and not self.model:
            raise ValueError("WARMQ_MODEL: name the model's folder, e.g. WARMQ_MODEL=models/tiny")
        return self

    def with_engine_log(self, workers_log: str | None) -> Self:
        """Return these settings; an engine with a log of its own adds the log's path."""
        return self

    @property
    def see_engine_log(self) -> str:
        """The end of an error's text, which names the engine's log; '' without one."""
        return ""

    @cached_property
    def model_name(self) -> str | None:
        """The model's name; if the model is a folder, the folder's name."""
        folder = Path(self.model or "")
        return (folder.is_dir() and self.model and folder.resolve().name) or self.model

    @property
    def queue_to_drain(self) -> str:
        """The name of the queue from which this worker takes requests."""
        return queue_name(self.served_model_name, self.queue)

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """The host and port of /metrics; None if /metrics is not served."""
        if self.metrics_port is None:
            return None
        host, _, port = self.metrics_port.rpartition(":")
        # Scrapers run on other machines, and the page contains no secret.
        return host.strip("[]") or "0.0.0.0", int(port)  # noqa: S104

    @property
    def redis_timeout_s(self) -> float:
        """The timeout of Redis calls in seconds; leases survive one RENEW without an answer."""
        return min(SOCKET_TIMEOUT_S, max(2.0, self.lease_s / 3))

    @property
    def lease_ms(self) -> int:
        """The setting `lease_s` in milliseconds, as the Lua scripts take it."""
        return int(self.lease_s * 1000)
