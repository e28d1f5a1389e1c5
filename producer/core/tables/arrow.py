"""pyarrow, which only those need who have tables."""

from __future__ import annotations

import importlib
from typing import Any

from contract.errors import WarmqError


class ExtraMissing(WarmqError):
    """A package that this needs is not installed; the message names the extra that brings it."""

    code = "extra_missing"


def pyarrow(what: str, module: str = "") -> Any:
    """Return pyarrow, or a module of it; `what` needs it.

    Raises:
        ExtraMissing: it is not installed.
    """
    try:
        return importlib.import_module(f"pyarrow.{module}" if module else "pyarrow")
    except ImportError as error:
        raise ExtraMissing(
            f"{what}: needs pyarrow ({error}): pip install 'warmq[tables]'"
        ) from None
