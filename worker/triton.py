"""Write a model repository for Triton Server: `python -m worker.triton MODEL -o DIR`."""

import sys

from worker.tools.triton import main

if __name__ == "__main__":
    sys.exit(main())
