"""Compile a model for RBLN: `python -m worker.compile MODEL -o DIR --batch-size 4 ...`."""

import sys

from worker.tools.compile import main

if __name__ == "__main__":
    sys.exit(main())
