"""What the programs of this folder share: their options, and the file of what was measured."""

from __future__ import annotations

import argparse
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.common import report
from bench.gpu import workload


def options(
    doc: str, *, shape: str = "8b", rounds: int = 4, seconds: float = 1e9,
    seconds_are: str = "begin no round after so many",
) -> argparse.ArgumentParser:  # fmt: skip
    """Return a parser with the options that each of them has, with these defaults."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(workload.SHAPES), default=shape)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seconds", type=float, default=seconds, help=seconds_are)
    parser.add_argument("--commit", help="where the checkout has no git")
    return parser


class Record:
    """The file of --out, written after every round."""

    def __init__(self, chosen: argparse.Namespace, begin: float, **told: Any) -> None:
        machine = report.machine() | {"accelerator": accelerator()}
        if chosen.commit:
            machine["commit"] = chosen.commit
        ready_s = round(time.monotonic() - begin, 1)
        self._path = chosen.out
        model = getattr(chosen, "model", None)
        shape = model.name if model else chosen.shape
        self.data: dict[str, Any] = {
            "part": chosen.out.stem, "machine": machine, "shape": shape,
        }  # fmt: skip
        self.data |= told | {"ready_s": ready_s}
        print("ready after", ready_s, "s", flush=True)

    def keep(self, **found: Any) -> None:
        """Write what is known by now."""
        self.data |= found
        self._path.write_text(report.as_text(self.data))


def accelerator() -> str:
    """Return the GPU's name and driver, as nvidia-smi has them."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    with suppress(OSError):
        done = subprocess.run(query, capture_output=True, text=True, check=False)
        return done.stdout.strip()
    return ""
