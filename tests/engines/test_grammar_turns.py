"""Many slow constraints of one tenant do not hold up another one's, in the real process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from contract.errors import RequestFailed
from demo.stack import CPU_ENGINE_ARGS, MODEL

pytestmark = pytest.mark.timeout(300)
#: Each is another one; the first takes as much processor time as a constraint may have.
SLOW = [{"type": "string", "pattern": f"^[a-z]{{0,5{n}000}}$"} for n in range(8)]
QUICK = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@asynccontextmanager
async def grammars_of(at_once: int) -> AsyncIterator[Any]:
    """Yield what checks the constraints of the shipped model's engine; its process ends after."""
    from vllm import AsyncEngineArgs

    from worker.engine.catalogue import load_settings
    from worker.engine.vllm.arguments import parse_engine_args
    from worker.engine.vllm.grammars import Grammars

    settings: Any = load_settings(engine="vllm", model=str(MODEL), engine_args=CPU_ENGINE_ARGS)
    args = AsyncEngineArgs.from_cli_args(parse_engine_args(settings))
    grammars = Grammars(at_once)
    grammars._config = args.create_engine_config()
    try:
        yield grammars
    finally:
        compiler = grammars._compiler
        grammars.end()
        if compiler is not None:
            await compiler.process.wait()  # its pipes are closed before the loop is


async def ask(grammars: Any, tenant: str, schema: dict[str, Any], ended: list[str]) -> None:
    """Check a schema; note its tenant and how it ended."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from worker.engine.vllm.grammars import TENANT
    from worker.engine.vllm.names import VLLMValidationError

    TENANT.set(tenant)
    made = StructuredOutputsParams(json=json.dumps(schema))
    try:
        await grammars.check(SamplingParams(structured_outputs=made), made)
        ended.append(f"{tenant} valid")
    except VLLMValidationError:
        ended.append(f"{tenant} refused")
    except RequestFailed as error:
        ended.append(f"{tenant} {error}")


async def test_a_tenants_new_schema_waits_for_one_of_anothers_and_not_for_all() -> None:
    ended: list[str] = []
    async with grammars_of(at_once=1) as grammars:
        # Each begins before the next one: the slow ones are all in the line first.
        slow = [asyncio.create_task(ask(grammars, "a", schema, ended)) for schema in SLOW]
        quick = asyncio.create_task(ask(grammars, "b", QUICK, ended))
        # a's place for it in the line is the last
        same = asyncio.create_task(ask(grammars, "c", SLOW[-1], ended))
        await asyncio.gather(*slow, quick, same)
    # Behind the one that is compiled and the next one of who waits already.
    order = "".join(one[0] for one in ended)
    assert order == "aabc" + "a" * (len(SLOW) - 2), ended
    assert "b valid" in ended, ended


async def test_schemas_are_compiled_beside_each_other_and_all_end_with_the_process() -> None:
    ended: list[str] = []
    async with grammars_of(at_once=2) as grammars:
        slow = asyncio.create_task(ask(grammars, "slow", SLOW[-1], ended))
        await ask(grammars, "quick", QUICK, ended)
        await slow
        assert [one.split()[0] for one in ended] == ["quick", "slow"], ended
        two = [
            asyncio.create_task(ask(grammars, name, SLOW[n], ended)) for n, name in enumerate("xy")
        ]
        while len(grammars._compiler._asked) < 2:  # noqa: ASYNC110  tasks set no event
            await asyncio.sleep(0)
        grammars._compiler.process.kill()
        await asyncio.gather(*two)
        assert all("does not answer (EOFError)" in one for one in ended[2:]), ended
        await ask(grammars, "z", QUICK | {"title": "z"}, ended)
        assert ended[4:] == ["z valid"]
