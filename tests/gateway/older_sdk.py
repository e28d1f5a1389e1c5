"""What programs do with OpenAI's SDK 2.x; run by its own interpreter, prints one JSON."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import openai

URL, MODEL, INPUT = os.environ["BASE_URL"], os.environ["MODEL"], Path(os.environ["INPUT"])
client = openai.OpenAI(base_url=URL, api_key="none")
question = json.loads(INPUT.read_text().splitlines()[0])["body"]
seen: dict[str, object] = {"version": openai.__version__}


def ended(batch_id: str) -> openai.types.Batch:
    """Return a batch when it has ended."""
    while True:
        batch = client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        time.sleep(0.2)


async def asked_async() -> str:
    """Return the answer of the asynchronous client, streamed."""
    async with openai.AsyncOpenAI(base_url=URL, api_key="none") as asking:
        stream = await asking.chat.completions.create(**question, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


file = client.files.create(file=INPUT, purpose="batch")
seen["status"] = client.files.wait_for_processing(file.id).status
made = client.batches.create(
    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
)
batch = ended(made.id)
seen["batch"] = batch.model_dump()
assert batch.output_file_id is not None
seen["output"] = client.files.content(batch.output_file_id).text
whole = client.uploads.upload_file_chunked(
    file=INPUT, mime_type="application/jsonl", purpose="batch", part_size=1000
)
assert whole.file is not None
seen["upload"] = client.files.content(whole.file.id).read() == INPUT.read_bytes()
seen["listed"] = batch.id in [each.id for each in client.batches.list(limit=1)]
seen["chat"] = client.chat.completions.create(**question).choices[0].message.content
seen["streamed"] = asyncio.run(asked_async())
raw = client.completions.with_raw_response.create(
    model=MODEL, prompt="2 + 3 =", max_tokens=4, temperature=0
)
seen["completion"] = raw.parse().choices[0].text
seen["request_id"] = raw.headers["x-request-id"] == raw.request_id
seen["models"] = [model.id for model in client.models.list()]
try:
    client.batches.retrieve("batch_nothing")
except openai.NotFoundError as error:
    seen["unread"] = [error.code, error.request_id is not None]
sys.stdout.write(json.dumps(seen))
