"""The commands that the gateway brings to `producer` (entry point warmq.commands), a file each."""

#: Their names, and what `--help` says of them, as in producer/cli/main.py.
COMMANDS = {
    "keys": "Give, list and revoke the keys by which callers of `producer serve` are known.",
    "serve": "Serve the OpenAI API over the queue: files, batches, online answers.",
    "webhooks": "Say where tenants hear that a batch of `producer serve` has ended.",
}
