"""The options that shape a batch besides its file, which `submit` and `run` take alike."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from contract.naming import queue_name
from contract.settings import Settings
from producer.cli import options
from producer.cli.values import parse_overrides
from producer.submit.submission import Submission

#: In the order of `--help`.
_OPTIONS = {
    "model": options.model,
    "priority": options.priority,
    "tenant": options.tenant,
    "turn": options.turn,
    "pairs": options.pairs,
    "once": options.once,
    "order": options.order,
}


def shaping_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options; it takes their values as `shaping`, by name."""

    @wraps(command)
    def collected(*args: Any, **values: Any) -> Any:
        return command(*args, shaping={name: values.pop(name) for name in _OPTIONS}, **values)

    for option in reversed(_OPTIONS.values()):
        collected = option(collected)
    return collected


def make_submission(
    settings: Settings, batch_id: str, shaped: dict[str, Any], deadline: str = ""
) -> Submission:
    """Return what `shaped` asks for; `deadline` as CREATE takes it.

    Raises:
        BadOption: naming the option that is wrong.
    """
    found = Submission(
        batch_id,
        queue_name(shaped["model"] or None, settings.queue),
        shaped["priority"],
        shaped["model"],
        parse_overrides(shaped["pairs"]),
        deadline,
        tenant=shaped["tenant"],
        in_order=shaped["turn"] == "fifo",
        once=shaped["once"],
        order=shaped["order"],
    )
    found.check()
    return found
