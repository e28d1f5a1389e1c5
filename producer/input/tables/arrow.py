"""pyarrow, which only those need who have tables."""

from __future__ import annotations

import importlib
from typing import Any

from contract.errors import ExtraMissing


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
