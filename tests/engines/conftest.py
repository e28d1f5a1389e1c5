"""Remote engines: each test file starts its own servers."""

from __future__ import annotations

import real_stack  # noqa: F401 - finds `questions`, which the tests import
