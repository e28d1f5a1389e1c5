"""Takes the pictures of docs/how-to/page.md, of a gateway with vLLM and the shipped model behind
it.

    .venv/bin/python tests/ui/pictures.py [SECONDS] [simulated]

A Korean font has to be there (Debian's fonts-nanum). With `simulated` the engine is the simulated
one, where vLLM is not at hand.

Every page is taken as it is; the model's batches are run for a while first, so that the ring of the
last hour has something to show.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import openai
import orjson
from kit.engines.run_batch_lines import NAME
from kit.gateways.browser import Watched, browser, watched
from kit.gateways.gateway_process import GatewayProcess
from kit.gateways.real_gateway import RealGateway, questions_as_batch, real_gateway
from kit.protocol.lessee import submit_batch
from kit.stacks.celery_side import simulated
from PIL import Image

from contract.openai.body import CHAT_URL
from contract.redis.batches import BatchStore
from contract.redis.history import HistoryReads
from contract.redis.tenants import Tenant
from demo.stack import RedisServer, eventually

FOLDER = ROOT / "docs/pictures"
#: So long the batches run before the first picture, in seconds.
RUNS_S = float(sys.argv[1]) if len(sys.argv) > 1 else 100.0
TALLEST = 1500


def story(name: str, tokens: int) -> dict[str, Any]:
    """Return a line whose answer has so many tokens."""
    ask = [{"role": "user", "content": f"Tell me story {name}."}]
    body = {"model": NAME, "messages": ask, "max_tokens": tokens, "ignore_eos": True}
    return {"custom_id": f"story-{name}", "method": "POST", "url": CHAT_URL, "body": body}


def send(real: RealGateway, name: str, lines: list[dict[str, Any]]) -> tuple[str, str]:
    """Send lines as a batch; return the ids of the batch and its file."""
    file = b"\n".join(orjson.dumps(line) for line in lines)
    made = real.client.files.create(file=(name, file), purpose="batch")
    batch = real.client.batches.create(
        input_file_id=made.id, endpoint=CHAT_URL, completion_window="24h"
    )
    return batch.id, made.id


def take(view: Watched, name: str) -> None:
    """Save what is seen, in few colours: it is for a page of documentation."""
    path = FOLDER / f"{name}.png"
    end = round(
        view.page.evaluate("document.getElementById('content').getBoundingClientRect().bottom")
    )
    view.page.screenshot(path=path, full_page=True)
    with Image.open(path) as found:
        cut = found.convert("RGB").crop((0, 0, found.width, min(end, found.height, TALLEST)))
    cut.quantize(64).save(path, optimize=True)


@contextmanager
def simulated_gateway(folder: Path) -> Iterator[RealGateway]:
    """Run the same with the simulated engine, whose answers take as long as stories."""
    with RedisServer(folder / "redis") as server, server.client() as client:
        worker = simulated(
            server.url, folder / "worker.log", served_model_name=NAME, simulated_slots=32,
            simulated_latency_s=2.0, model=NAME,
        )  # fmt: skip
        worker.start()
        try:
            eventually(BatchStore(client, ttl_ms=600_000).announcements, 60, "a worker is there")
            with (
                GatewayProcess(server.url, folder) as gateway,
                openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as sdk,
            ):
                yield RealGateway(server.url, folder, f"{gateway.url}/v1", sdk)
        finally:
            worker.kill()


def main() -> None:
    """Run the stack and take all pictures."""
    FOLDER.mkdir(exist_ok=True)
    made = simulated_gateway if "simulated" in sys.argv else real_gateway
    with tempfile.TemporaryDirectory() as folder, made(Path(folder)) as real:
        _, questions = questions_as_batch(400)
        bad = [story("none", 0)]
        if "simulated" not in sys.argv:  # which has no longest answer
            bad.append(story("endless", 10**6))
        _, to_plan = send(real, "arithmetic.jsonl", [*questions[:200], bad[0]])
        done, _ = send(real, "questions.jsonl", [*questions[:200], *bad, *questions[200:]])
        real.ended(done)
        measure(real)
        lengths = random.Random(1)
        stories = [story(str(n), lengths.randrange(100, 900)) for n in range(5000)]
        running, _ = send(real, "stories.jsonl", stories)
        port = int(real.redis_url.rpartition(":")[2].partition("/")[0])
        with RedisServer(Path(folder) / "unused", port=port).client() as client:
            store = BatchStore(client, ttl_ms=600_000)
            store.set_tenant(Tenant("research", 2.0))
            bodies = [story(f"of others {n}", 200 + n % 300)["body"] for n in range(3000)]
            submit_batch(
                store, batch_id="evaluation", queue=f"warmq.{NAME}", tenant="research",
                bodies=bodies,
            )  # fmt: skip
            client.lpush(f"warmq.{NAME}", b"a message that nobody can read")
            time.sleep(RUNS_S)  # no synchronisation: the last hour is to have minutes
            pages(real, {
                "overview": "/ui",
                "batches": "/ui/batches",
                "batch-running": f"/ui/batches/{running}",
                "batch-ended": f"/ui/batches/{done}",
                "workers": "/ui/workers",
                "tenants": "/ui/tenants",
                "dead-letters": "/ui/dead",
                "submit": "/ui/submit",
                "plan": f"/ui/submit?file={to_plan}",
            }, running)  # fmt: skip


def measure(real: RealGateway) -> None:
    """Run stories until the worker has written what it did, by which a plan has a time."""
    port = int(real.redis_url.rpartition(":")[2].partition("/")[0])
    with RedisServer(Path("unused"), port=port).client() as client:
        store = BatchStore(client, ttl_ms=600_000)

        def knows() -> bool:
            return any(
                minute.completed for minute in HistoryReads.using(store).day([f"warmq.{NAME}"])
            )

        lengths = random.Random(2)
        for name in ("rehearsal", "second-rehearsal"):
            lines = [story(f"{name}-{n}", lengths.randrange(100, 900)) for n in range(250)]
            real.ended(send(real, f"{name}.jsonl", lines)[0], 300)
        eventually(knows, 60, "what the worker did is written")


def pages(real: RealGateway, paths: dict[str, str], running: str) -> None:
    """Take every page in both widths and themes, and three in Korean."""
    url = real.url.removesuffix("/v1")
    with browser() as chrome:
        for width, height in ((1280, 860), (390, 844)):
            for theme in ("light", "dark"):
                with watched(chrome, width=width, height=height, dark=theme == "dark") as view:
                    for name, path in paths.items():
                        view.page.goto(url + path)
                        settled(view)
                        take(view, f"{name}-{width}-{theme}")
                    one_request(view, f"{url}/ui/batches/{running}")
                    take(view, f"request-{width}-{theme}")
        with watched(chrome, width=1280, height=860, language="ko") as view:
            for name in ("overview", "batch-running", "submit"):
                view.page.goto(url + paths[name])
                settled(view)
                take(view, f"{name}-1280-ko")


def settled(view: Watched) -> None:
    """Wait until the stream has told rates, where a page shows them."""
    rate = view.page.locator('[data-f="out_s"]')

    def told() -> bool:
        return rate.count() == 0 or rate.inner_text() not in ("–", "0")

    eventually(told, 30, "the stream tells rates")


def one_request(view: Watched, address: str) -> None:
    """Open a request that runs, and wait for its text."""

    def found() -> bool:
        view.page.goto(address)
        return view.page.locator(".chips a").count() > 0

    eventually(found, 60, "a request runs", every_s=0.2)
    view.page.locator(".chips a").last.click()
    text = view.page.locator("#live-text")
    least = 5 if "simulated" in sys.argv else 100
    eventually(lambda: len(text.inner_text()) > least, 60, "its text is long enough", every_s=0.1)


if __name__ == "__main__":
    main()
