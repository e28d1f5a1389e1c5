"""vLLM's options as rows: what is set, and what has to be seen for the option to have worked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.machine.packages import Release

#: The release of vLLM that rows are of unless they name another: the one below vllm-rbln 0.12.
MOST: Release = (0, 30)
#: One that speculates on the CPU: its runner replaces the Triton kernels of the rejection sampler
#: by C++ ones, which takes no effect in 0.30.
SPECULATES: Release = (0, 29)
#: Under every row's own options, of which the last one counts.
BASE = (
    "--max-num-seqs 16 --max-model-len 1024 --dtype float32 --enforce-eager "
    "--kv-cache-memory-bytes 67108864 --gpu-memory-utilization 0.2"
)
#: For pipeline stages: on the CPU vLLM 0.30 makes room for what they pass on in a warm-up, which
#: it skips with --enforce-eager; this compiles as little.
STAGED = BASE.replace("--enforce-eager", '--compilation-config \'{"mode": 2, "backend": "eager"}\'')
#: For what the engine itself finds: nothing can be computed before it starts.
UNSIZED = BASE.replace("--kv-cache-memory-bytes 67108864 ", "")
#: What is said of speculation before anything is loaded; the engine would die of it.
KILLS = "speculation kills vLLM 0.30 on the CPU .*"
#: vLLM logs its statistics every second.
STATS = {"VLLM_LOG_STATS_INTERVAL": "1"}
CACHED = "--enable-prefix-caching --enable-prompt-tokens-details --block-size 32"
#: vLLM gives each process of a CPU engine a NUMA node of its own unless it is told the cores.
NOBIND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
SIXTEEN_BITS = "--dtype bfloat16"
MP = "--distributed-executor-backend mp"
TWO = {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2}
LORA = "--enable-lora --max-loras 3 --max-lora-rank 8 --lora-modules noisy={lora} silent={zero}"


@dataclass(frozen=True)
class Row:
    """One start of the worker.

    `args` and `model` may name folders: `{model}`, `{lora}`, `{zero}`, `{merged}`, `{gptq}`,
    `{awq}`, `{compressed-tensors}`, `{other-vocabulary}`. `shows`: what the worker's log must
    have. `details`: what `inspect stats` must say. `refused`: how the worker must end instead.
    """

    name: str
    args: str
    base: str = BASE
    model: str = "{model}"
    env: Mapping[str, str] = field(default_factory=dict)
    shows: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    #: The row whose answers it must give, and the share that must be equal: below 1 where
    #: arithmetic differs.
    like: str | None = "plain"
    least: float = 1.0
    #: What lines give as `model`.
    named: str | None = None
    #: The file is run twice, and the second time tokens must come from the prefix cache.
    cached: bool = False
    #: A module that the option needs and that is not in the locked environment.
    needs: str | None = None
    #: The row runs only where this vLLM is installed, major and minor.
    release: Release = MOST
    #: Whether vLLM's statistics must tell of accepted drafts.
    speculates: bool = False
    refused: str | None = None


def named(release: Release) -> str:
    """Return (0, 30) as `0.30`."""
    return ".".join(map(str, release))


def speculation(**fields: Any) -> str:
    """Return --speculative-config."""
    return f"--speculative-config '{json.dumps(fields)}'"


NGRAM = speculation(
    method="ngram", num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4
)
DRAFT = speculation(model="{model}", num_speculative_tokens=4)
SUFFIX = speculation(method="suffix", num_speculative_tokens=8)


def speculating(name: str, args: str, needs: str | None = None) -> Row:
    """Return a row of the release that speculates on the CPU."""
    return Row(
        f"{name}-0.29", args, like="plain-0.29", release=SPECULATES, env=STATS,
        speculates=True, needs=needs,
    )  # fmt: skip


ROWS = (
    Row("plain", "", like=None),
    Row("merged", "", model="{merged}", like=None),
    Row("tensor-parallel", f"--tensor-parallel-size 2 {MP}", env=NOBIND, details=TWO),
    Row("pipeline-parallel", f"--pipeline-parallel-size 2 {MP}", env=NOBIND, base=STAGED,
        details=STAGES),
    Row(
        "pipeline-eager", f"--pipeline-parallel-size 2 {MP}", env=NOBIND,
        refused="on the CPU vLLM skips the warm-up of .*",
    ),
    Row(
        "tensor-unbound", "--tensor-parallel-size 2",
        refused="2 engine processes on a CPU with 1 NUMA nodes.*",
    ),
    Row("ray", "--tensor-parallel-size 2 --distributed-executor-backend ray", env=NOBIND,
        needs="ray", refused="current platform cpu does not support ray"),
    Row("data-parallel", "--data-parallel-size 2", env=NOBIND,
        details={"data_parallel_size": 2, "max_num_seqs": 32}),
    Row("draft-model", DRAFT, refused=KILLS),
    Row("ngram", NGRAM, refused=KILLS),
    Row("suffix", SUFFIX, refused=KILLS),
    Row("pipeline-and-ngram", f"--pipeline-parallel-size 2 {NGRAM}", env=NOBIND, base=STAGED,
        refused=KILLS),
    Row("plain-0.29", "", like=None, release=SPECULATES),
    speculating("draft-model", DRAFT),
    speculating("ngram", NGRAM),
    speculating("suffix", SUFFIX, needs="arctic_inference"),
    Row("pipeline-and-ngram-0.29", f"--pipeline-parallel-size 2 {NGRAM}", env=NOBIND, base=STAGED,
        release=SPECULATES, refused="speculation with pipeline stages hangs vLLM .*"),
    Row(
        "other-vocabulary", speculation(model="{other-vocabulary}", num_speculative_tokens=4),
        refused="the draft model .* has 999 tokens in its vocabulary, .* has 1024.*",
    ),
    Row("prefix-caching", CACHED, cached=True, env=STATS,
        shows=(r"Prefix cache hit rate: [1-9][\d.]*%",)),
    Row("lora-and-prefix-caching", f"{LORA} {CACHED}", like="merged", named="noisy", cached=True),
    Row("bfloat16", SIXTEEN_BITS, details={"dtype": "torch.bfloat16"}, least=0.7),
    Row("compressed-tensors", f"--quantization compressed-tensors {SIXTEEN_BITS}",
        model="{compressed-tensors}", least=0.7),
    Row("gptq", f"--quantization gptq {SIXTEEN_BITS}", model="{gptq}", least=0.3),
    Row("awq", f"--quantization awq {SIXTEEN_BITS}", model="{awq}", least=0.3),
    Row("fp8", f"--quantization fp8 {SIXTEEN_BITS}",
        refused=r"RuntimeError: _C::static_scaled_fp8_quant\(\) expected at most 0 argument.*"),
    Row("kv-cache-memory-bytes", "--block-size 128 --kv-cache-memory-bytes 5898240"),
    Row(
        "kv-cache-one-byte-less", "--block-size 128 --kv-cache-memory-bytes 5898239",
        refused="Write --max-model-len 896 or --kv-cache-memory-bytes 5898240",
    ),
    Row(
        "max-model-len", "--max-model-len 400000", base=UNSIZED,
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"},
        refused="the KV cache has .* GiB and holds .*",
    ),
    Row(
        "gpu-memory-utilization", "--gpu-memory-utilization 0.999", base=UNSIZED,
        refused=r"--gpu-memory-utilization 0.999 asks for .* GiB are free on .* NUMA node.*",
    ),
)  # fmt: skip
