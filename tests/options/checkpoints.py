"""Small checkpoints made from the shipped model: a LoRA adapter, its sum with the model, and
weights of eight and four bits. Layouts are those of PEFT, GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo.stack import MODEL

RANK, ALPHA = 8, 16
GROUP = 32
WEIGHTS = "model.safetensors"
#: Matrices that are quantised.
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: In which order AWQ packs eight columns into one word.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NIBBLES = torch.arange(0, 32, 4, dtype=torch.int64)


def copy_model(folder: Path, weights: dict[str, Tensor], **config: Any) -> Path:
    """Write the shipped model with other weights and further keys in its config.json."""
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns(WEIGHTS))
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def make_adapter(folder: Path, seed: int = 1, strength: float = 0.15, rank: int = RANK) -> Path:
    """Write a LoRA adapter whose values are drawn from a seed; `strength` 0 changes nothing."""
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    tensors = {}
    for name, weight in load_file(MODEL / WEIGHTS).items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            rows, columns = weight.shape
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, columns) * strength
            tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, rank) * strength
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny",
        "r": rank, "lora_alpha": ALPHA, "target_modules": ["q_proj", "v_proj"], "bias": "none",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge(adapter: Path, folder: Path) -> Path:
    """Write the sum of the model and an adapter, in float32."""
    weights = {name: weight.float() for name, weight in load_file(MODEL / WEIGHTS).items()}
    deltas = load_file(adapter / "adapter_model.safetensors")
    for name, a in deltas.items():
        if name.endswith(".lora_A.weight"):
            b = deltas[name.replace("lora_A", "lora_B")]
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            weights[target] += b @ a * (ALPHA / RANK)
    return copy_model(folder, weights, dtype="float32")


def quantised(folder: Path, method: str) -> Path:
    """Write the model rounded to four (gptq, awq) or eight bits (compressed-tensors)."""
    pack, config = {
        "gptq": (_gptq, {"bits": 4, "group_size": GROUP, "sym": True, "desc_act": False,
                         "lm_head": False, "checkpoint_format": "gptq"}),
        "awq": (_awq, {"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
        "compressed-tensors": (_eight_bits, _EIGHT_BITS),
    }[method]  # fmt: skip
    weights: dict[str, Tensor] = {}
    for name, weight in load_file(MODEL / WEIGHTS).items():
        stem = name.removesuffix(".weight")
        if stem.endswith(LINEAR):
            weights |= {f"{stem}.{part}": t for part, t in pack(weight.float()).items()}
        else:
            weights[name] = weight.float()
    config = {"quant_method": method} | config
    return copy_model(folder, weights, quantization_config=config, dtype="float32")


_EIGHT_BITS: dict[str, Any] = {
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel",
                        "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "int", "symmetric": True,
                                  "strategy": "token", "dynamic": True},
        }
    },
}  # fmt: skip


def _eight_bits(weight: Tensor) -> dict[str, Tensor]:
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales}


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return values 0 to 15, where 8 is zero, [in, out], and scales [in / GROUP, out]."""
    turned = weight.t().contiguous()
    groups = turned.view(-1, GROUP, turned.shape[1])
    scales = groups.abs().amax(dim=1) / 7
    values = (groups / scales[:, None] + 8).round().clamp(0, 15)
    return values.view_as(turned).long(), scales


def _packed(values: Tensor) -> Tensor:
    """Pack the last dimension, of eight values, into one signed word each."""
    words = (values.long() << NIBBLES).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _gptq(weight: Tensor) -> dict[str, Tensor]:
    values, scales = _rounded(weight)
    rows, columns = values.shape
    zeros = torch.full((scales.shape[0], columns // 8, 8), 7)  # stored less one
    return {
        "qweight": _packed(values.view(rows // 8, 8, columns).transpose(1, 2)),
        "qzeros": _packed(zeros),
        "scales": scales.half(),
        "g_idx": (torch.arange(rows) // GROUP).to(torch.int32),
    }


def _awq(weight: Tensor) -> dict[str, Tensor]:
    values, scales = _rounded(weight)
    rows, columns = values.shape
    zeros = torch.full((scales.shape[0], columns // 8, 8), 8)
    return {
        "qweight": _packed(values.view(rows, columns // 8, 8)[..., list(AWQ_ORDER)]),
        "qzeros": _packed(zeros),
        "scales": scales.half(),
    }
