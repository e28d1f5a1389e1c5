"""Start a worker as it must be: `warmq-worker`."""

import sys
from pathlib import Path

from contract.version import version

OPTIONS = ("--pool=solo", "--without-gossip", "--without-mingle")
HELP = """\
Usage: warmq-worker [OPTIONS OF `celery worker`]

Start a worker in the foreground, as `celery -A worker.app worker {options}` does.

It is configured by environment variables, .env or warmq.toml. At least name the model:

  WARMQ_MODEL=models/tiny warmq-worker

Options that are of use here (`celery worker --help` lists all):
  -n, --hostname NAME    name for `celery inspect`; default: warmq-<random>@<host>
  -l, --loglevel LEVEL   default: INFO
  -f, --logfile FILE     default: stderr
  --version              show the version and exit
  -h, --help             show this and exit

Look at a start without starting: python -m worker.check
Exit status: 0 stopped by SIGTERM; 1 stopped by Ctrl-C, or the log says why it could not work.
"""


def main() -> None:
    """Run a worker to its end, with the command line's options; exits with its status."""
    words = sys.argv[1:]
    if {"-h", "--help"} & {*words}:
        sys.stdout.write(HELP.format(options=" ".join(OPTIONS)))
        sys.exit()
    if "--version" in words:
        sys.stdout.write(f"warmq {version()}\n")
        sys.exit()
    from celery.bin.celery import celery

    # Loaded from where this module is, also in a folder that has a `worker` of its own.
    import worker.app  # noqa: F401

    # As celery's own script would be called: Celery calls it again to restart, or to detach.
    script = str(Path(sys.executable).with_name("celery"))
    sys.argv = [script, "-A", "worker.app", "worker", *OPTIONS, *words]
    celery(prog_name="celery", auto_envvar_prefix="CELERY")
