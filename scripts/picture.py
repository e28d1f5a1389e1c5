"""Makes docs/pictures/running-batch.svg, the README's picture of a batch that runs.

The script runs the commands in the picture in a pseudo-terminal, against the demo's worker (vLLM on
the CPU, models/tiny), and draws what they printed. `watch` redraws one line; the script draws the
state in which half of the requests were done.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from demo.stack import ROOT, RedisServer, tiny_model_worker

PICTURE = ROOT / "docs/pictures/running-batch.svg"
QUESTIONS = ROOT / "demo" / "questions.jsonl"
#: How often the demo's 300 lines are submitted: once would take only about a second.
TIMES = 20
#: Columns of the terminal.
COLUMNS = 110
#: The line of a first batch, which warms up the engine.
WARM_UP = '{"custom_id": "a", "prompt": "Question: What is 3 plus 4?\\nAnswer:", "max_tokens": 8}\n'
#: Characters with which rich begins to draw the same line again.
REDRAWN = "\r\x1b[2K"


def write_prompts(path: Path) -> None:
    """Write the demo's lines TIMES times with new custom_ids; write bad lines once."""
    lines = [json.loads(line) for line in QUESTIONS.read_text().splitlines()]
    with path.open("w") as file:
        for repeat in range(TIMES):
            for number, line in enumerate(lines):
                bad = line.get("body", line)["max_tokens"] < 1
                if repeat == 0 or not bad:
                    line |= {"custom_id": f"q{repeat * len(lines) + number + 1}"}
                    file.write(json.dumps(line) + "\n")


def run_in_terminal(command: str, env: dict[str, str], cwd: Path) -> str:
    """Run a command in a pseudo-terminal; return all that it wrote there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    process = subprocess.Popen(
        ["sh", "-c", command], env=env, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the command has closed its end
            break
        written += piece
    os.close(ours)
    if process.wait() not in (0, 1):  # 1: some requests failed
        sys.exit(f"{command} ended with {process.returncode}: {written!r}")
    # The picture shows file names without the temporary folder.
    return written.decode().replace(f"{cwd}/", "")


def half_way(output: str) -> str:
    """Return the state of the progress bar in which half of the requests were done."""

    def distance(state: str) -> float:
        done, total = map(int, re.findall(r"(\d+)/(\d+) done", state)[0])
        return abs(done / total - 0.5)

    states = [state for state in output.split(REDRAWN) if re.search(r"/[1-9]\d* done", state)]
    return min(states, key=distance).splitlines()[0]


def draw(sections: list[tuple[str, str]]) -> None:
    """Write the picture: commands with their output, as (command, output in ANSI)."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        for command, output in sections:
            console.print(Text("$ ", style="green") + Text(command, style="bold"))
            drawn = half_way(output) if command.startswith("producer watch") else output
            for line in drawn.split(REDRAWN)[-1].splitlines():
                if line := re.sub(r"\x1b\[\?25[lh]", "", line).rstrip():
                    console.print(Text.from_ansi(line))
    # A page shows the picture as an image, and an image may not load fonts.
    form = re.sub(r"@font-face \{\{.*?\n    \}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    form = re.sub(r"[ \t]+\n", "\n", form)
    svg = console.export_svg(
        title=f"vLLM on {os.cpu_count()} CPU cores, models/tiny",
        code_format=form,
        unique_id="warmq",
    )
    PICTURE.write_text(svg + "\n")


def main() -> None:
    """Run the commands, and draw the picture."""
    with tempfile.TemporaryDirectory(prefix="warmq-picture-") as name:
        folder = Path(name)
        write_prompts(folder / "prompts.jsonl")
        with (
            RedisServer(folder / "redis") as server,
            tiny_model_worker(server.url, folder / "worker.log"),
        ):
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            env = os.environ | {
                "PATH": path, "WARMQ_REDIS_URL": server.url, "TERM": "xterm-256color",
            }  # fmt: skip
            warm_up = ["producer", "submit", "-", "--wait"]
            subprocess.run(
                warm_up, input=WARM_UP, text=True, env=env, check=True, capture_output=True
            )
            commands = [
                "producer submit prompts.jsonl --batch-id monday",
                "producer watch monday",
                "producer results monday -o answers.jsonl --errors errors.jsonl",
                'grep -o \'"content":"[^"]*"\' answers.jsonl | head -n 3',
            ]
            sections = [(command, run_in_terminal(command, env, folder)) for command in commands]
    draw(sections)


if __name__ == "__main__":
    main()
