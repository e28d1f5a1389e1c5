"""Settings of `producer serve`: `WARMQ_GATEWAY_*`, and what producer and worker share."""

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from contract.settings import Bytes, Seconds, Settings, Text
from gateway.served_models import configured_models

#: After so many seconds without a sign of life another gateway takes work over.
LEASE_S = 6.0


def _models(text: str) -> str:
    configured_models(text)  # refuses what it cannot read
    return text


class GatewaySettings(Settings):
    """What a gateway takes besides what every producer takes."""

    refuses_unknown_names: ClassVar[bool] = False

    gateway_host: Text = Field("127.0.0.1", description="address that the gateway listens on")
    gateway_port: Annotated[int, Field(ge=0, le=65535)] = Field(
        8000, description="port that the gateway listens on; 0 for any that is free"
    )
    gateway_store: Text = Field(
        "warmq-files",
        description="where files are kept: a folder, or s3://, gs://, az:// and a bucket",
    )
    gateway_max_file_bytes: Bytes = Field(
        8 * 2**30, description="largest file that is taken, in bytes"
    )
    gateway_max_requests: Annotated[int, Field(ge=0, le=2**40)] = Field(
        0, description="most requests of a batch that comes over HTTP; 0 for no limit"
    )
    gateway_batch_runner: bool = Field(
        True, description="whether this gateway also carries batches, in a process of its own"
    )
    gateway_models: Annotated[Text, AfterValidator(_models)] = Field(
        "",
        description="models that may be asked for although no worker serves them now, by commas: "
        "`NAME`; `OTHER=NAME` for another name of its workers; `NAME=` for the default queue's",
    )
    gateway_online_timeout_s: Seconds = Field(
        50, gt=0, description="how long an online request may wait for its answer, in seconds"
    )
    drain_timeout_s: Seconds = Field(
        10,
        ge=0,
        le=3600,
        description="how long a gateway that stops waits for open requests, in seconds",
    )
    gateway_private_webhooks: bool = Field(
        False, description="whether webhooks may go to private addresses"
    )

    @property
    def max_body_bytes(self) -> int:
        """Most bytes in a body that is no upload: a line, and as much again for how it is written
        in the fields around it; 1 MiB at least, which the parts of an upload and metadata need."""
        return max(2**20, 2 * self.max_line_bytes)
