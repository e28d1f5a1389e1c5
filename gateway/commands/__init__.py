"""The commands that the gateway adds to `producer`, one module each."""

#: Help text of each command, like those in producer/cli/main.py.
COMMANDS = {
    "keys": "Create, list and revoke API keys for `producer serve`.",
    "serve": "Serve the APIs of OpenAI and Anthropic over the queue, and a page at /ui.",
    "webhooks": "Create, list and delete the endpoints of webhooks, "
    "for batches of `producer serve`.",
}
