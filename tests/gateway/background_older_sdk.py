"""What programs do with background responses by OpenAI's SDK 2.x; prints one JSON."""

import json
import os
import sys
import time

import openai

MODEL = os.environ["MODEL"]
client = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none")
assert openai.__version__.startswith("2.")

made = client.responses.create(model=MODEL, input="Hello", background=True)
answer = made
while answer.status in ("queued", "in_progress"):
    time.sleep(0.1)
    answer = client.responses.retrieve(made.id)
items = list(client.responses.input_items.list(made.id))
slow = client.responses.create(
    model=MODEL, input="Hello", background=True, user="simulate:sleep=60"
)
cancelled = client.responses.cancel(slow.id)
client.responses.delete(made.id)
try:
    client.responses.retrieve(made.id)
    deleted = "no error"
except openai.NotFoundError as error:
    deleted = type(error).__name__
sys.stdout.write(json.dumps({
    "created": made.status, "background": made.background, "ended": answer.status,
    "text": answer.output_text, "items": [item.content[0].text for item in items],
    "cancelled": cancelled.status, "deleted": deleted,
}))  # fmt: skip
