"""Which addresses an engine and its clients get, and where there can be one client only."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from contract.settings import SettingsError
from worker.engine.vllm import clients
from worker.engine.vllm.clients import SPARE, EngineClients

pytestmark = pytest.mark.timeout(180)  # importing vLLM takes seconds
ARGS = Namespace(kv_cache_memory_bytes=7, gpu_memory_utilization=None)


@pytest.fixture
def core_client(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return vLLM's module of the client; what its function gets is recorded."""
    module = SimpleNamespace(got=[])

    def launch_core_engines(*args: Any) -> str:
        module.got.append(args)
        args[3].frontend_stats_publish_address = "ipc:stats"
        return "launch"

    module.launch_core_engines = launch_core_engines
    monkeypatch.setattr(clients, "core_client", module)
    return module


def bound(address: str) -> Any:
    """Return vLLM's addresses, with those of the client that starts the engine."""
    return SimpleNamespace(inputs=[f"{address}/in"], outputs=[f"{address}/out"])


def test_an_engine_gets_the_sockets_of_all_its_clients_and_each_client_a_pair(
    core_client: Any,
) -> None:
    of_vllm, addresses = core_client.launch_core_engines, bound("ipc://first")
    two = EngineClients(2)
    assert two.new(ARGS) is None  # no engine yet
    two = EngineClients(2)
    with two.started():
        assert core_client.launch_core_engines("config", "executor", True, addresses) == "launch"
    assert core_client.launch_core_engines is of_vllm
    assert core_client.got == [("config", "executor", True, addresses)]
    count = 2 + SPARE
    assert addresses.inputs[0] == "ipc://first/in" and addresses.outputs[0] == "ipc://first/out"
    assert len(addresses.inputs) == len(addresses.outputs) == count
    assert len({*addresses.inputs, *addresses.outputs}) == 2 * count
    new = [two.new(ARGS) for _ in range(count)]
    assert new.pop() is None  # the first client is this process
    for index, client in enumerate(new, 1):
        assert client is not None
        assert (client["index"], client["clients"]) == (index, count)
        assert client["memory"] == {"kv-cache-memory-bytes": 7}
        assert client["addresses"] == {
            "input_address": addresses.inputs[index],
            "output_address": addresses.outputs[index],
            "stats_update_address": "ipc:stats",
        }


def test_an_engine_of_one_client_is_started_as_vllm_does(core_client: Any) -> None:
    of_vllm = core_client.launch_core_engines
    with EngineClients(1).started():
        assert core_client.launch_core_engines is of_vllm


def test_an_engine_of_several_machines_takes_one_client(core_client: Any) -> None:
    of_vllm = core_client.launch_core_engines
    with pytest.raises(SettingsError, match="WARMQ_FRONT_ENDS"), EngineClients(2).started():
        core_client.launch_core_engines("config", "executor", True, bound("tcp://10.0.0.1:5"))
    assert core_client.launch_core_engines is of_vllm
    assert core_client.got == []
