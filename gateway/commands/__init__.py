"""The gateway's commands of `producer` (entry point warmq.commands), one file each."""

#: Help texts by name, as in producer/cli/main.py.
COMMANDS = {
    "keys": "Create, list and revoke API keys for `producer serve`.",
    "serve": "Serve the OpenAI API over the queue: files, batches, online answers.",
    "webhooks": "Create, list and delete webhooks for ended batches of `producer serve`.",
}
