"""Settings of the triton engine, which sends requests to Triton servers with vLLM's backend."""

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from contract.redis.url import is_address
from contract.settings import Text
from worker.engine.remote import RemoteSettings, preflight_of
from worker.engine.spec import EngineSpec, Preflight


def _split(addresses: str) -> list[str]:
    return [one.strip() for one in addresses.split(",") if one.strip()]


def _addresses(addresses: str) -> str:
    hosts = [one.removeprefix("grpcs://").removeprefix("grpc://") for one in _split(addresses)]
    if not hosts or not all("/" in host or is_address(host) for host in hosts):
        raise ValueError("must name host:port or grpcs://host:port")
    return addresses


class TritonSettings(RemoteSettings):
    """Settings of the triton engine. `model` is the folder of the model's tokenizer."""

    needs_model: ClassVar[bool] = True

    triton_url: Annotated[Text, AfterValidator(_addresses)] = Field(
        "127.0.0.1:8001",
        description="gRPC addresses of Triton, separated by commas; grpcs:// is TLS",
    )
    triton_model: Text = Field("vllm_model", description="name of the model that Triton serves")

    @property
    def addresses(self) -> list[str]:
        """The gRPC addresses of the servers."""
        return _split(self.triton_url)


def check(settings: TritonSettings) -> Preflight:
    """Describe the configured servers."""
    servers = f"{settings.triton_url}, model {settings.triton_model}"
    return preflight_of("triton", servers, str(settings.model), "as many as the servers take")


ENGINE = EngineSpec(
    TritonSettings,
    "worker.engine.triton.engine:TritonEngine",
    check,
    "worker.engine.triton.engine:dry_run",
)
