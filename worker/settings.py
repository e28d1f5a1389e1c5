"""The worker's settings; see contract/settings.py for where they come from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr, model_validator

from contract.redis.connect import SOCKET_TIMEOUT_S
from contract.redis.keys import queue_name
from contract.settings import Bytes, Count, Line, Seconds, Settings
from worker.setting_types import (
    Addresses,
    EngineArgs,
    HeaderSecret,
    LogFile,
    Name,
    Step,
    is_base_url,
)

#: Set by the worker, read by its engine processes: seconds between SIGTERM and SIGKILL when the
#: worker has died. Not a setting; without it they are killed at once.
ASK_FIRST_ENV = "WARMQ_ASK_FIRST_S"


class WorkerSettings(Settings):
    """Everything a worker can be told. Times end in `_s` and are seconds."""

    engine: Literal["vllm", "openai", "triton", "simulated"] = Field(
        "vllm", description="which engine adapter runs"
    )
    model: Name | None = Field(None, description="folder or hub name of the model")
    served_model_name: Name | None = Field(
        None,
        max_length=200,
        description="serve this name from the queue `<queue>.<name>` instead of `<queue>`",
    )
    engine_args: EngineArgs = Field(
        "", description="vLLM's own command line options, in vLLM's spelling"
    )
    engine_stats_s: Seconds | None = Field(
        None, ge=0.1, description="vLLM's own statistics in the log every so often; default never"
    )
    default_max_tokens: int = Field(
        1024,
        ge=1,
        le=2**31 - 1,
        description="max_tokens of requests that name none; never unlimited",
    )
    look_ahead: Count | None = Field(
        None, ge=0, description="requests held above max_num_seqs; default max(8, max_num_seqs / 4)"
    )
    max_in_flight: Count | None = Field(
        None, ge=1, description="cap on requests in flight; default max_num_seqs + look_ahead"
    )
    max_in_flight_bytes: Bytes = Field(
        256 * 2**20, description="message bytes in flight above which no more are taken"
    )
    pop_bytes: Bytes = Field(2 * 2**20, description="most message bytes taken in one POP")
    lease_s: Seconds = Field(
        60, ge=2, description="how long a dead worker's requests stay unavailable"
    )
    max_deaths: Count = Field(
        2, ge=1, description="engine deaths after which a request is run as a suspect"
    )
    drain_timeout_s: Seconds = Field(
        25, ge=0, description="how long SIGTERM waits for running requests; then hands back"
    )
    stall_timeout_s: Seconds = Field(
        300, ge=0.1, description="no engine step for so long while requests run means it hangs"
    )
    rebuild_tries: int = Field(
        3, ge=0, le=20, description="engine starts that may fail in a row before the worker exits"
    )
    kill_grace_s: Seconds | None = Field(
        None, ge=0, description="between SIGTERM and SIGKILL of an engine; default 5, RBLN 120"
    )
    media_private_networks: bool = Field(
        False, description="let image, audio and video URLs of lines lead into private networks"
    )
    rbln_devices: str | None = Field(
        None,
        pattern=r"^[0-9]{1,4}(,[0-9]{1,4})*$",
        description="RBLN: cards of this worker's engine, as 0,1",
    )
    rbln_timeout_s: Seconds = Field(
        60, gt=0, description="RBLN: the runtime's own time limit on one step"
    )
    triton_url: Addresses = Field(
        "127.0.0.1:8001", description="triton: gRPC addresses, separated by commas; grpcs:// is TLS"
    )
    triton_model: Line = Field("vllm_model", description="triton: name of the model it serves")
    triton_slots: Count | None = Field(
        None, ge=1, description="triton: max_num_seqs of each server; default its config's, or 64"
    )
    triton_wait_s: Seconds = Field(
        600, gt=0, description="triton: how long a start waits for a server that is ready"
    )
    openai_base_urls: Line = Field(
        "", description="openai engine: the servers' base URLs, as http://host:8000/v1,..."
    )
    openai_api_key: HeaderSecret = Field(
        SecretStr(""), description="openai engine: the servers' key"
    )
    openai_concurrency: Count | None = Field(
        None, ge=1, description="openai engine: requests at once per server; default from metrics"
    )
    simulated_slots: Count = Field(64, ge=1, description="simulated engine: max_num_seqs")
    simulated_latency_s: Seconds = Field(0.2, ge=0, description="simulated engine: mean latency")
    simulated_step_s: Step = Field(
        0, ge=0, description="simulated engine: requests end in steps of so long; 0: each by itself"
    )
    simulated_log: LogFile | None = Field(
        None, description="simulated engine: file that every start and end is appended to"
    )

    simulated_build_s: Seconds = Field(0, ge=0, description="simulated engine: time to start it")
    simulated_fate: str = Field(
        "",
        pattern=r"^(simulate:[a-z-]+(=[0-9]{1,9}(\.[0-9]{1,9})?)?)?$",
        description="simulated engine: what befalls requests whose `user` says nothing",
    )
    simulated_process: bool = Field(
        False, description="simulated engine: with a child process that can be killed or stopped"
    )

    @model_validator(mode="after")
    def _vllm_needs_a_model(self) -> WorkerSettings:
        if self.engine in ("vllm", "triton") and not self.model:
            raise ValueError("WARMQ_MODEL: name the model's folder, e.g. WARMQ_MODEL=models/tiny")
        return self

    @model_validator(mode="after")
    def _openai_needs_urls(self) -> WorkerSettings:
        for url in self.base_urls if self.engine == "openai" else ():
            if not is_base_url(url):  # said without it: it may hold a password
                raise ValueError(
                    "WARMQ_OPENAI_BASE_URLS: name http:// or https:// URLs, separated by commas; "
                    "a key belongs into WARMQ_OPENAI_API_KEY"
                )
        if self.engine == "openai" and not self.base_urls:
            raise ValueError("WARMQ_OPENAI_BASE_URLS: name a server, e.g. http://127.0.0.1:8000/v1")
        return self

    @property
    def base_urls(self) -> list[str]:
        """The openai engine's servers, without slashes at the end."""
        urls = (url.strip().rstrip("/") for url in self.openai_base_urls.split(","))
        return [url for url in urls if url]

    @property
    def queue_to_drain(self) -> str:
        """The queue this worker serves."""
        return queue_name(self.served_model_name, self.queue)

    @property
    def redis_timeout_s(self) -> float:
        """How long a silent Redis is waited for; a lease outlives one RENEW that gets no answer."""
        return min(SOCKET_TIMEOUT_S, max(2.0, self.lease_s / 3))

    @property
    def lease_ms(self) -> int:
        """`lease_s` as Redis takes it."""
        return int(self.lease_s * 1000)
