"""Reads a folder compiled by optimum-rbln, without the vendor's packages.

Since vllm-rbln 0.9.3 the limits in `rbln_config.json` override the user's options. This module
reads the layouts of optimum-rbln 0.8 to 0.12, and `_meta` of 0.7 and older.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.settings import SettingsError

#: The file of a compiled folder that contains its settings.
CONFIG_NAME = "rbln_config.json"
#: Tokens of a prefill chunk if the file does not name it: optimum-rbln's default for ATOM cards.
DEFAULT_PREFILL_CHUNK = 128
#: Submodels of a multimodal model that may contain the limits of its text model.
TEXT_PARTS = ("language_model", "text_model")
#: Fields with the size of a KV block.
BLOCK_SIZES = ("kvcache_block_size", "kvcache_partition_len")


@dataclass(frozen=True, slots=True)
class Artefact:
    """A compiled model. Lengths, block sizes and chunks are in tokens.

    `buckets` are the batch sizes of decode steps, largest first. `npu` is the card's name, for
    example RBLN-CA25, or None if the file does not name it. `missing` are compiled files that
    rbln_config.json names and `folder` lacks. `legacy`: compiled by optimum-rbln 0.7 or older.
    """

    folder: Path
    model_class: str
    optimum_version: str | None
    legacy: bool
    batch_size: int
    max_seq_len: int
    block_size: int
    prefill_chunk: int
    kv_blocks: int | None
    buckets: tuple[int, ...]
    num_devices: int
    npu: str | None
    missing: tuple[str, ...]

    @property
    def flash_attention(self) -> bool:
        """Whether the model uses flash attention: its context is split into blocks."""
        return self.block_size < self.max_seq_len

    def __str__(self) -> str:
        attention = f"flash, blocks of {self.block_size}" if self.flash_attention else "eager"
        return (
            f"{self.folder}: {self.model_class}, compiled by optimum-rbln "
            f"{self.optimum_version or '?'}, {attention} attention"
        )


def read_artefact(model: str | Path | None) -> Artefact | None:
    """Return the compiled model of a folder; None if the folder has no rbln_config.json.

    Raises:
        SettingsError: rbln_config.json cannot be read, or is not a text model's.
    """
    file = Path(model or "") / CONFIG_NAME
    if not model or not file.is_file():
        return None
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"WARMQ_MODEL: {file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise SettingsError(f"WARMQ_MODEL: {file} does not contain a JSON object")
    return _artefact(file.parent, config)


def _artefact(folder: Path, config: dict[str, Any]) -> Artefact:
    part_name, part = _text_part(config)
    compiled = part.get("_compile_cfgs") or config.get("_compile_cfgs") or []
    compiled = [one for one in compiled if isinstance(one, dict)]
    length = _first(part, "max_seq_len", "dec_max_seq_len")
    batch = _first(part, "batch_size") or _first(config, "batch_size")
    if length is None or batch is None:
        raise SettingsError(
            f"WARMQ_MODEL: {folder / CONFIG_NAME} has no batch_size or no max_seq_len; "
            "is this a text model? Recompile it: python -m worker.compile MODEL -o DIR"
        )
    meta = config.get("_meta")
    version = config.get("optimum_rbln_version")
    if version is None and isinstance(meta, dict):
        version = meta.get("version")
    buckets = [b for b in part.get("decoder_batch_sizes") or [] if _positive(b)]
    return Artefact(
        folder=folder,
        model_class=str(config.get("cls_name") or (meta or {}).get("cls") or "unknown"),
        optimum_version=version,
        legacy="_meta" in config,
        batch_size=batch,
        max_seq_len=length,
        block_size=_first(part, *BLOCK_SIZES) or length,
        prefill_chunk=_first(part, "prefill_chunk_size") or DEFAULT_PREFILL_CHUNK,
        kv_blocks=_first(part, "kvcache_num_blocks"),
        buckets=tuple(sorted(buckets or [batch], reverse=True)),
        # optimum-rbln 0.8 to 0.10 wrote num_devices as tensor_parallel_size.
        num_devices=max(
            (_first(c, "num_devices", "tensor_parallel_size") or 1 for c in compiled), default=1
        ),
        npu=next((str(c["npu"]) for c in compiled if c.get("npu")), None),
        missing=tuple(_missing(folder, part_name, compiled)),
    )


def _text_part(config: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return the name (None for the whole model) and settings of the text model."""
    nested = [(name, config.get(name)) for name in TEXT_PARTS]
    for name, part in [(None, config), *nested]:
        if isinstance(part, dict) and any(part.get(size) for size in BLOCK_SIZES):
            return name, part
    return None, config


def _missing(folder: Path, part: str | None, compiled: list[dict[str, Any]]) -> list[str]:
    names = [f"{c['compiled_model_name']}.rbln" for c in compiled if c.get("compiled_model_name")]
    places = [folder, folder / part] if part else [folder]
    return [n for n in names if not any((place / n).is_file() for place in places)]


def _first(part: dict[str, Any], *names: str) -> int | None:
    return next((part[n] for n in names if _positive(part.get(n))), None)


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
