"""What an autoscaler is told: all that waits and all that runs, also while no worker lives."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import redis
from kit.gateways.gateway_process import GatewayProcess
from kit.protocol.lessee import QUEUE, Lessee, celery_message, submit_batch

from contract import naming
from contract.redis.batches import BatchStore
from demo.stack import eventually
from gateway.redis.api_keys import ApiKeys
from gateway.redis.fleet import UNKNOWN_TOKENS


def scale(gateway: GatewayProcess, model: str = "", key: str = "") -> dict[str, Any]:
    answer = httpx.get(
        f"{gateway.url}/warmq/v1/scale", params={"model": model} if model else {},
        headers={"Authorization": f"Bearer {key}"} if key else {},
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_queue_that_nobody_has_used_holds_nothing(
    gateway: GatewayProcess, store: BatchStore
) -> None:
    assert scale(gateway) == {
        "queue": QUEUE, "waiting": 0, "in_flight": 0, "requests": 0, "workers": 0, "slots": 0,
        "tokens": 0, "mean_tokens": UNKNOWN_TOKENS,
    }  # fmt: skip


def test_what_waits_in_any_list_and_what_runs_is_counted(
    gateway: GatewayProcess, store: BatchStore, redis_client: redis.Redis
) -> None:
    submit_batch(store, 5)
    for n, name in enumerate(naming.priority_lists(QUEUE)):
        redis_client.lpush(name, celery_message(f"plain{n}", {}))
    redis_client.lpush(f"{QUEUE}:suspects", celery_message("suspect", {}))
    told = scale(gateway)
    assert (told["waiting"], told["in_flight"]) == (10, 0)

    worker = Lessee(redis_client)
    leased = worker.pop(4)
    told = scale(gateway)
    assert (told["waiting"], told["in_flight"], told["requests"]) == (6, 4, 10)
    assert told["tokens"] == 10 * UNKNOWN_TOKENS
    worker.done(*leased)
    assert (scale(gateway)["waiting"], scale(gateway)["in_flight"]) == (6, 0)


def test_a_model_has_its_own_queue_and_need_not_be_served(
    gateway: GatewayProcess, store: BatchStore, redis_client: redis.Redis
) -> None:
    redis_client.lpush(f"{QUEUE}.org/m", celery_message("one", {}))
    assert scale(gateway, "org/m")["waiting"] == 1
    assert scale(gateway, "other")["waiting"] == scale(gateway)["waiting"] == 0


def test_tokens_are_those_that_requests_of_the_queue_cost(
    gateway: GatewayProcess, store: BatchStore, redis_client: redis.Redis
) -> None:
    submit_batch(store, 3)
    redis_client.hset(naming.turns_key(QUEUE), "mean", "1000.5")
    told = scale(gateway)
    assert (told["mean_tokens"], told["tokens"]) == (1000.5, round(3 * 1000.5))


def test_a_key_for_some_models_is_told_of_these_alone(
    gateway: GatewayProcess, store: BatchStore
) -> None:
    keys = ApiKeys.using(store)
    secret, _ = keys.create("scaler", models=["m"])
    eventually(
        lambda: httpx.get(f"{gateway.url}/warmq/v1/scale").status_code == 401, 10, "keys are known"
    )
    assert scale(gateway, "m", secret)["queue"] == f"{QUEUE}.m"
    for params in ({"model": "other"}, {}):
        answer = httpx.get(
            f"{gateway.url}/warmq/v1/scale", params=params,
            headers={"Authorization": f"Bearer {secret}"},
        )  # fmt: skip
        assert answer.status_code == 403, params
        assert answer.json()["error"]["code"] == "model_not_allowed"


@pytest.mark.parametrize("mean", ["0.0", "0.1"])
def test_what_waits_is_never_told_as_no_tokens(
    gateway: GatewayProcess, store: BatchStore, redis_client: redis.Redis, mean: str
) -> None:
    """Servers may report no usage: KEDA would stop the workers over a full queue."""
    submit_batch(store, 3)
    redis_client.hset(naming.turns_key(QUEUE), "mean", mean)
    told = scale(gateway)
    assert (told["mean_tokens"], told["tokens"]) == (float(mean), 3)
