"""Leaves out what vLLM logs of an orderly end: the worker says that it stops, and why.

With VLLM_LOGGING_LEVEL=DEBUG all of it is logged.
"""

import logging

STEPS = ("[shutdown]", "Parent process exited")
#: What AsyncLLM makes of an engine that has ended, with a traceback, also if it was told to.
CONSEQUENCE = "AsyncLLM output_handler failed"


class _OrderlyEnd(logging.Filter):
    """`ending` says that the worker is ending the engine; warnings and errors of that are kept."""

    ending = False

    def filter(self, record: logging.LogRecord) -> bool:
        if logging.getLogger("vllm").isEnabledFor(logging.DEBUG):
            return True
        text = str(record.msg)
        if self.ending and text.startswith(CONSEQUENCE):
            return False
        return record.levelno > logging.INFO or not text.startswith(STEPS)


ORDERLY_END = _OrderlyEnd()


def quieten() -> None:
    """Do so in this process from now on."""
    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(ORDERLY_END)
