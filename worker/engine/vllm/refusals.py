"""What vLLM refuses of its options and of its configuration, as one sentence."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

import pydantic

from contract.settings import SettingsError


@contextmanager
def refusals(*kinds: type[Exception]) -> Iterator[None]:
    """Raise the checks of vLLM's configuration, and errors of these kinds, as SettingsError."""
    told = "WARMQ_MODEL, WARMQ_ENGINE_ARGS: vLLM refuses them: "
    try:
        yield
    except SettingsError:
        raise
    except pydantic.ValidationError as error:
        raise SettingsError(told + error.errors()[0]["msg"]) from None
    except kinds as error:
        raise SettingsError(told + " ".join(str(error).split())) from None


def meant(message: str, options: Iterable[str]) -> str:
    """Return which of the options was meant, if a parser's message quotes one that is unknown."""
    known = [*options]
    words = [word.partition("=")[0].rstrip(":,") for word in message.split()]
    unknown = [word for word in words if word.startswith("--") and word not in known]
    near = get_close_matches(unknown[0], known, 1) if unknown else []
    return f"; did you mean {near[0]}" if near else ""
