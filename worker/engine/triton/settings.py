"""The settings of the triton engine."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from contract.redis.url import is_address
from contract.settings import Count, Line
from worker.engine.remote.settings import RemoteSettings


def _addresses(addresses: str) -> str:
    hosts = [one.strip().removeprefix("grpcs://").removeprefix("grpc://")
             for one in addresses.split(",") if one.strip()]  # fmt: skip
    if not hosts or not all("/" in host or is_address(host) for host in hosts):
        raise ValueError("must name host:port or grpcs://host:port")
    return addresses


class TritonSettings(RemoteSettings):
    """What the triton engine can be told; `model` has the tokenizer."""

    needs_model: ClassVar[bool] = True

    triton_url: Annotated[Line, AfterValidator(_addresses)] = Field(
        "127.0.0.1:8001", description="triton: gRPC addresses, separated by commas; grpcs:// is TLS"
    )
    triton_model: Line = Field("vllm_model", description="triton: name of the model it serves")
    triton_slots: Count | None = Field(
        None, ge=1, description="triton: max_num_seqs of each server; default its config's, or 64"
    )
