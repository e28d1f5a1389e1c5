"""Reads the memory of the NVIDIA GPUs that CUDA_VISIBLE_DEVICES makes visible, with NVML.

NVML is a library of NVIDIA's driver. It is called directly, because importing vLLM takes seconds.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

from worker.machine.devices import Memory


class _Sizes(ctypes.Structure):
    """NVML's nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong),
    )  # fmt: skip


def gpu_memory() -> Memory | None:
    """Return the memory of the visible GPUs together; None without a GPU or its driver."""
    memories = gpu_memories()
    return (
        Memory(sum(m.total for m in memories), sum(m.free for m in memories)) if memories else None
    )


def gpu_memories() -> list[Memory]:
    """Return the memory of each visible GPU; [] without a GPU or its driver."""
    nvml, memories = _nvml(), []
    for handle in _handles(nvml) if nvml else ():
        sizes = _Sizes()
        if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(sizes)):
            return []
        memories.append(Memory(sizes.total, sizes.free))
    return memories


@cache
def _nvml(library: str = "libnvidia-ml.so.1") -> Any:
    """Return the initialised library; None if it cannot be used."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    return None if nvml.nvmlInit_v2() else nvml


@cache
def _handles(nvml: Any) -> list[ctypes.c_void_p]:
    """Return the handles of the visible GPUs, which are named by number or UUID."""
    chosen, count = os.environ.get("CUDA_VISIBLE_DEVICES"), ctypes.c_uint()
    if chosen is None:
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        names = [str(number) for number in range(count.value)]
    else:
        names = [name for one in chosen.split(",") if (name := one.strip())]
    handles = []
    for name in names:
        handle = ctypes.c_void_p()
        if name.isdecimal():
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
        else:
            uuid = name.encode()
            failed = nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle))
        if failed:  # the driver ignores an entry that names no GPU, and all after it
            break
        handles.append(handle)
    return handles
