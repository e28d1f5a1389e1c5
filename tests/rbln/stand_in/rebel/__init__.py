"""A CPU stand-in for Rebellions' `rebel`: EMULATION, for tests only; never evidence of NPU speed.

It has just what the real optimum-rbln 0.12 and vllm-rbln 0.12 touch. "Compiling" stores the
wrapped torch module, "running" executes it eagerly, with plain implementations of the
vendor's attention operators. Controlled through the folder WARMQ_TEST_REBEL (faults.py).
"""

from importlib.metadata import PackageNotFoundError, version

try:
    _real = version("rebel-compiler")
except PackageNotFoundError:
    _real = None
if _real is not None:
    raise ImportError(
        f"the tests' stand-in for rebel must not hide the real rebel-compiler {_real}: "
        "run the emulated tests in an environment of their own"
    )

import torch

from . import cards as _cards
from . import operators as _operators
from .compile_context import CompileContext
from .compiled import RBLNCompiledModel, compile_from_torch
from .runtime import Runtime

__all__ = [
    "CompileContext",
    "RBLNCompiledModel",
    "Runtime",
    "compile",
    "compile_from_torch",
    "device_count",
    "get_npu_name",
    "manual_seed",
    "npu_is_available",
]
__version__ = "0.12.0"

_operators.register()


def device_count():
    return len(_cards.VISIBLE)


def get_npu_name(device_id=0):
    return _cards.NAME if 0 <= device_id < device_count() else None


def npu_is_available(device_id=0):
    return get_npu_name(device_id) is not None


def manual_seed(seed):
    torch.manual_seed(seed)


def compile(model, *args, num_devices=1, dtype=None, **kwargs):
    # optimum-rbln looks only at this signature.
    raise NotImplementedError("the stand-in compiles with compile_from_torch")
