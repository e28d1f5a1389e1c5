"""A worker with the simulated engine on a host that is unlike others: names, streams, locale."""

from __future__ import annotations

from pathlib import Path

from kit.stacks.started_as import WarmqWorker


class OddHostWorker(WarmqWorker):
    """A worker of which a test names the command's options and what a shell does to its streams."""

    def __init__(
        self,
        redis_url: str,
        log_path: Path,
        *words: str,
        before: str = "",
        streams: str = "",
        env: dict[str, str] | None = None,
        **settings: object,
    ) -> None:
        """Prepare: `words` end the command line; `streams` are redirections, such as `2>&-`, and
        `before` is what the shell does before it becomes the worker."""
        self._words, self._script = words, f'{before} exec "$@" {streams}'
        defaults: dict[str, object] = {"engine": "simulated", "simulated_latency_s": 0}
        super().__init__(redis_url, log_path, env=env, **(defaults | settings))

    def command(self) -> list[str]:
        """Return a shell that arranges the streams and becomes the worker."""
        return ["bash", "-c", self._script, "bash", *super().command(), *self._words]
