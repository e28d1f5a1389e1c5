"""`warmq-worker`: starts a worker."""

import sys
from pathlib import Path

from contract.version import version

#: Options that `celery worker` gets before the user's.
OPTIONS = ("--pool=solo", "--without-gossip", "--without-mingle")
#: The text of --help.
HELP = """\
Usage: warmq-worker [OPTIONS OF `celery worker`]

Start a worker in the foreground, as `celery -A worker.app worker {options}` does.

It is configured by environment variables, .env or warmq.toml. At least name the model:

  WARMQ_MODEL=models/tiny warmq-worker

Useful options (`celery worker --help` lists all):
  -n, --hostname NAME    name for `celery inspect`; default: warmq-<random>@<host>
  -l, --loglevel LEVEL   default: INFO
  -f, --logfile FILE     default: stderr
  --version              show the version and exit
  -h, --help             show this and exit

Check a start without starting: python -m worker.check
Exit status: 0 stopped by SIGTERM; 1 stopped by Ctrl-C, or it could not work (see its log).
"""


def main() -> None:
    """Run a worker with the options of the command line, and exit with its status."""
    words = sys.argv[1:]
    if {"-h", "--help"} & {*words}:
        sys.stdout.write(HELP.format(options=" ".join(OPTIONS)))
        sys.exit()
    if "--version" in words:
        sys.stdout.write(f"warmq {version()}\n")
        sys.exit()
    from celery.bin.celery import celery

    # Imported here, from this module's path: the current folder may contain another `worker`.
    import worker.app  # noqa: F401

    # Celery runs this command line again to restart or to detach.
    script = str(Path(sys.executable).with_name("celery"))
    sys.argv = [script, "-A", "worker.app", "worker", *OPTIONS, *words]
    celery(prog_name="celery", auto_envvar_prefix="CELERY")
