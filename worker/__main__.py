"""Starts a worker: `python -m worker` does the same as `warmq-worker`."""

from worker.tools.start import main

if __name__ == "__main__":
    main()
