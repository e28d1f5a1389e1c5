"""Turns of large messages on the drain's loop."""

import asyncio
import time

#: Messages up to this size need not wait: reading one takes less than a millisecond.
LARGE_BYTES = 16_384


class Turns:
    """Lets large messages begin one after another, with as long for the others in between.

    To read a message of megabytes, or of thousands of parts, takes 0.1 s, in which nothing else
    happens on the loop. A worker is given many messages at once; if all were read in one turn of
    the loop, leases would not be renewed and nobody's answer would be sent for seconds.
    """

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        #: Until then the loop belongs to others; time.monotonic().
        self._others_until = 0.0

    async def wait(self) -> None:
        """Wait until a large message may be read; what follows runs without a break."""
        async with self._one:
            await asyncio.sleep(max(0.0, self._others_until - time.monotonic()))
            # Runs in the loop's next turn, before another message's: its lock is released later.
            asyncio.get_running_loop().call_soon(self._has_run, time.monotonic())

    def _has_run(self, began: float) -> None:
        now = time.monotonic()
        self._others_until = now + (now - began)
