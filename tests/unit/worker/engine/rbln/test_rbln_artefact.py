"""Reading compiled folders: four files that optimum-rbln 0.12.0 wrote, and made-up older ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.engines.compiled_folder import WRITTEN_BY_0_12, compiled, read

from contract.settings import SettingsError
from worker.engine.rbln.model import CONFIG_NAME, read_artefact


@pytest.mark.parametrize(
    ("name", "batch", "length", "block", "blocks", "buckets", "devices", "npu", "flash"),
    [
        ("b4_eager", 4, 512, 512, 4, (4,), 1, "RBLN-CA25", False),
        ("b4_buckets", 4, 512, 512, 4, (4, 2, 1), 1, "RBLN-CA25", False),
        ("b2_flash", 2, 4096, 1024, 8, (2,), 1, "RBLN-CA25", True),
        ("2dev", 2, 512, 512, 2, (2,), 2, None, False),
    ],
)
def test_the_vendors_own_files(
    tmp_path: Path, name: str, batch: int, length: int, block: int, blocks: int,
    buckets: tuple[int, ...], devices: int, npu: str | None, flash: bool,
) -> None:  # fmt: skip
    found = read(compiled(tmp_path, name))
    assert (found.batch_size, found.max_seq_len, found.block_size) == (batch, length, block)
    assert (found.kv_blocks, found.buckets, found.num_devices) == (blocks, buckets, devices)
    assert (found.npu, found.flash_attention, found.prefill_chunk) == (npu, flash, 128)
    assert (found.optimum_version, found.legacy, found.missing) == ("0.12.0", False, ())
    assert found.model_class == "RBLNLlamaForCausalLMConfig"


def test_compiled_files_that_are_missing_are_named(tmp_path: Path) -> None:
    folder = compiled(tmp_path, "b4_buckets")
    (folder / "decoder_batch_2.rbln").unlink()
    assert read(folder).missing == ("decoder_batch_2.rbln",)
    assert len(read(compiled(tmp_path / "none", "b4_eager", files=False)).missing) == 2


def test_a_multimodal_models_limits_are_nested(tmp_path: Path) -> None:
    part = json.loads((WRITTEN_BY_0_12 / "b2_flash.json").read_text())
    folder = compiled(tmp_path, {"cls_name": "Outer", "language_model": part, "batch_size": 1})
    (folder / "language_model").mkdir()
    (folder / "language_model" / "prefill.rbln").touch()
    found = read(folder)
    assert (found.batch_size, found.max_seq_len, found.block_size) == (2, 4096, 1024)
    assert (found.model_class, found.missing) == ("Outer", ("decoder_batch_2.rbln",))


def test_files_of_0_8_to_0_10_call_devices_tensor_parallel_size(tmp_path: Path) -> None:
    found = read(compiled(tmp_path, {
        "batch_size": 4, "max_seq_len": 8192, "kvcache_partition_len": 4096,
        "_compile_cfgs": [{"compiled_model_name": "prefill", "tensor_parallel_size": 4}],
    }))  # fmt: skip
    assert (found.num_devices, found.block_size, found.flash_attention) == (4, 4096, True)
    assert found.buckets == (4,)


def test_a_legacy_file_is_seen_as_one(tmp_path: Path) -> None:
    found = read(compiled(tmp_path, {
        "_meta": {"version": "0.1.13", "cls": "RBLNLlamaForCausalLM"},
        "batch_size": 4, "max_seq_len": 4096,
    }))  # fmt: skip
    assert (found.legacy, found.optimum_version) == (True, "0.1.13")
    assert (found.model_class, found.block_size) == ("RBLNLlamaForCausalLM", 4096)


def test_other_folders_and_hub_names_are_not_compiled(tmp_path: Path) -> None:
    assert read_artefact(tmp_path) is None
    assert read_artefact("meta-llama/Llama-3.1-8B") is None
    assert read_artefact(None) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "not contain a JSON object"),
        ('{"cls_name": "RBLNResNet"}', "no batch_size or no max_seq_len"),
        ('{"batch_size": true, "max_seq_len": -1}', "no batch_size or no max_seq_len"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / CONFIG_NAME).write_text(text)
    with pytest.raises(SettingsError, match=words):
        read_artefact(tmp_path)
