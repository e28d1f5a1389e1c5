"""Check this machine and its settings before a worker starts: `python -m worker.check`."""

import sys

from worker.tools.check import main

if __name__ == "__main__":
    sys.exit(main())
