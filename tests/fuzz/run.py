"""Fuzz the reader, the way of a file into the queue, and the worker's message handling, guided by
coverage.

    run.py [--seconds 60] [--full]

Starts from the committed corpus. With --full what is new goes into the corpus,
and the figures into summary.json. Ends non-zero at the first finding, and says
where the input is that caused it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from fuzz import corpus  # noqa: E402

TARGETS = ("lines", "messages", "bodies", "files")
#: libFuzzer calls an input that takes longer, in seconds, or more memory, in MB, a finding.
SLOW_S, MEMORY_MB = 30, 1024
#: The short form starts alike each time: a change is judged, not luck. 0 lets libFuzzer choose.
SEED = 20261123
#: One process fuzzes so long, in seconds of the clock; the next goes on with what it kept.
ROUND_S = 60
#: Words of the formats, so that the fuzzer need not guess them letter by letter.
WORDS = """custom_id method POST url /v1/chat/completions /v1/completions body messages role user
content prompt max_tokens temperature stop n seed logit_bias headers id task warmq.generate warmq
batch created line deadline v expires eta ignore_result properties body_encoding base64 utf-8
content-type application/json null true false 1e999 18446744073709551616 \\\\ud800 \\\\u0000
[[ ]]""".split()


def fuzz(target: str, seconds: float, full: bool) -> dict[str, object]:
    """Fuzz one target in one process at a time; return its figures.

    `seconds` are of the clock, with `full` of CPU time: machines are shared.
    """
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        kept, findings = work / "kept", work / "findings"
        kept.mkdir()
        findings.mkdir()
        corpus.unpack(target, kept)
        (work / "words").write_text("".join(f'"{word}"\n' for word in WORDS))
        executions = coverage = 0
        began, cpu = time.monotonic(), _children_cpu_s()
        wall_s = cpu_s = 0.0
        while (cpu_s if full else wall_s) < seconds:
            turn_s = min(ROUND_S, math.ceil(seconds - (cpu_s if full else wall_s)))
            done = subprocess.run(
                [
                    sys.executable, str(HERE / "fuzz_one.py"), target, f"-timeout={SLOW_S}",
                    f"-report_slow_units={SLOW_S}",
                    f"-rss_limit_mb={MEMORY_MB}", f"-max_total_time={turn_s}", "-max_len=20000",
                    f"-seed={0 if full else SEED}",
                    f"-dict={work}/words", "-print_final_stats=1",
                    f"-artifact_prefix={findings}/", str(kept),
                ],
                capture_output=True, text=True, errors="replace", check=False, env=_quiet(),
            )  # fmt: skip
            if done.returncode or any(findings.iterdir()):
                _tell_finding(target, findings, done.stderr[-3000:] + done.stdout[-3000:])
            executions += _number(r"stat::number_of_executed_units:\s+(\d+)", done.stderr)
            coverage = max(coverage, _number(r".*cov: (\d+)", done.stderr))
            wall_s, cpu_s = time.monotonic() - began, _children_cpu_s() - cpu
        figures: dict[str, object] = {
            "target": target, "executions": executions, "coverage": coverage,
            "cpu_s": round(cpu_s, 1), "wall_s": round(wall_s, 1), "findings": 0,
        }  # fmt: skip
        if full:
            figures["corpus"] = corpus.pack(target, kept)
        return figures


def _tell_finding(target: str, findings: Path, log: str) -> NoReturn:
    keep = HERE / "findings"
    keep.mkdir(exist_ok=True)
    for path in findings.iterdir():
        (keep / f"{target}-{path.name}").write_bytes(path.read_bytes())
    sys.exit(f"{log}\nfinding in {target}, inputs in {keep}; add them to its corpus")


def _quiet() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("WARMQ_")}


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _number(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--seconds", type=int, default=60, help="for each target; with --full of CPU time"
    )
    options.add_argument("--full", action="store_true", help="keep corpus and figures")
    chosen = options.parse_args()
    all_figures = []
    for target in TARGETS:
        all_figures.append(fuzz(target, chosen.seconds, chosen.full))
        print(json.dumps(all_figures[-1]))
    if chosen.full:
        cpu = sum(float(str(figures["cpu_s"])) for figures in all_figures)
        summary = {"cpu_minutes": round(cpu / 60, 1), "targets": all_figures}
        (HERE / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
