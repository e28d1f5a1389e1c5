"""Many slow constraints of one tenant do not hold up another one's, in the real process."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from contract.errors import RequestFailed
from demo.stack import CPU_ENGINE_ARGS, MODEL

pytestmark = pytest.mark.timeout(300)
#: Each is another one; the first takes as much processor time as a constraint may have.
SLOW = [{"type": "string", "pattern": f"^[a-z]{{0,5{n}000}}$"} for n in range(8)]
QUICK = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


async def test_a_tenants_new_schema_waits_for_one_of_anothers_and_not_for_all() -> None:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from worker.engine.catalogue import load_settings
    from worker.engine.vllm.arguments import parse_engine_args
    from worker.engine.vllm.grammars import TENANT, Grammars
    from worker.engine.vllm.names import VLLMValidationError

    grammars = Grammars()
    ended: list[str] = []

    async def ask(tenant: str, schema: dict[str, Any]) -> None:
        TENANT.set(tenant)
        made = StructuredOutputsParams(json=json.dumps(schema))
        try:
            await grammars.check(SamplingParams(structured_outputs=made), made)
            ended.append(f"{tenant} valid")
        except VLLMValidationError:
            ended.append(f"{tenant} refused")
        except RequestFailed as error:
            ended.append(f"{tenant} {error}")

    settings: Any = load_settings(engine="vllm", model=str(MODEL), engine_args=CPU_ENGINE_ARGS)
    args = AsyncEngineArgs.from_cli_args(parse_engine_args(settings))
    grammars._config = args.create_engine_config()
    try:
        # Each begins before the next one: the slow ones are all in the line first.
        slow = [asyncio.create_task(ask("a", schema)) for schema in SLOW]
        quick = asyncio.create_task(ask("b", QUICK))
        same = asyncio.create_task(ask("c", SLOW[-1]))  # a's place for it in the line is the last
        await asyncio.gather(*slow, quick, same)
    finally:
        process = grammars._process
        grammars.end()
        if process is not None:
            await process.communicate()  # its pipes are closed before the loop is
    # Behind the one that is compiled and the next one of who waits already.
    order = "".join(one[0] for one in ended)
    assert order == "aabc" + "a" * (len(SLOW) - 2), ended
    assert "b valid" in ended, ended
