"""What a line of the log that is about one request says of it, beside its text."""

from contract.message import Delivery
from contract.traces.span import read_context


def about(delivery: Delivery, action: str) -> dict[str, str]:
    """Return `extra` for the logger; `trace_id` where the message's sender has begun a trace."""
    found = {"action": action, "request_id": delivery.request_id, "batch_id": delivery.batch}
    headers = delivery.headers
    context = read_context(headers.get("traceparent"))
    return found | ({"trace_id": f"{context.trace_id:032x}"} if context else {})
