"""The log lines that a worker reports: the last ones, without the text of lines about a request."""

from __future__ import annotations

import logging

from worker.process.machine_report import LINES, RecentLines


def test_the_last_lines_are_kept_and_a_request_is_not_quoted() -> None:
    log = logging.getLogger("worker.test")
    log.setLevel(logging.INFO)
    with RecentLines() as recent:
        for n in range(30):
            log.info("line %d", n)
        log.error("secret prompt", extra={"request_id": "r1", "action": "result_too_large"})
        logging.getLogger("vllm").warning("secret prompt")
        relayed = logging.getLogger("worker.engine.vllm.processes")
        relayed.warning("secret prompt", extra={"action": "engine_log"})
        log.debug("not at this level")
    log.info("after the end")
    texts = [text for _, _, text in recent.lines]
    assert len(texts) == LINES
    assert texts[-3:] == ["line 29", "request r1: result_too_large", "a line of the engine's log"]
