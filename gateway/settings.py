"""Defines the settings of `producer serve`: WARMQ_GATEWAY_*, and those of all processes."""

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from contract.settings import PRIVATE_WEBHOOKS, Bytes, Seconds, Settings, Text
from gateway.served_models import configured_models

#: Seconds without renewal of a lease after which another gateway takes the work over.
LEASE_S = 6.0


def _checked_models(text: str) -> str:
    configured_models(text)  # raises ValueError for a malformed entry
    return text


class GatewaySettings(Settings):
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
        8 * 2**30, description="largest file that a client may upload, in bytes"
    )
    gateway_max_requests: Annotated[int, Field(ge=0, le=2**40)] = Field(
        0, description="most requests of a batch that is created over HTTP; 0 for no limit"
    )
    gateway_batch_runner: bool = Field(
        True, description="whether this gateway also runs batches, in a second process"
    )
    gateway_models: Annotated[Text, AfterValidator(_checked_models)] = Field(
        "",
        description="models that callers may use while no worker serves them, separated by commas: "
        "`NAME`; `OTHER=NAME`: callers use the name OTHER for the workers' model NAME; `NAME=`: "
        "callers use the name NAME for the default queue's model; `*=`: the same for all other "
        "names; unset: `*=` if the default queue's model is the only one",
    )
    gateway_online_timeout_s: Seconds = Field(
        50, gt=0, description="seconds for which an online request may wait for its answer"
    )
    gateway_not_loaded: Literal["queue", "refuse"] = Field(
        "queue",
        description="online requests for a model of `WARMQ_MODELS` that no worker has loaded: "
        "`queue` makes a worker load it, `refuse` answers 503",
    )
    drain_timeout_s: Seconds = Field(
        10,
        ge=0,
        le=3600,
        description="seconds for which a stopping gateway waits for open requests",
    )
    gateway_private_webhooks: bool = PRIVATE_WEBHOOKS

    @property
    def max_body_bytes(self) -> int:
        """Largest JSON body in bytes: twice the longest line, and at least 1 MiB.

        A body that lists all parts of an upload may need 1 MiB.
        """
        return max(2**20, 2 * self.max_line_bytes)
