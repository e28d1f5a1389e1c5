"""Runs a "compiled" model on the CPU; its KV cache stays here between calls."""

import io
import threading

import torch

from . import cards, faults

# Prefill and decode of one model share their cache, as they share the device's memory.
_caches = {}
_lock = threading.Lock()


class Runtime:
    def __init__(self, compiled, tensor_type="pt", device=0, timeout=None, **kwargs):
        faults.on_load()
        cards.take()
        # Of so small a model, threads only wait for each other; the vendor's worker sets more.
        torch.set_num_threads(1)
        self._module = torch.load(io.BytesIO(compiled.module), weights_only=False).eval()
        with _lock:
            self._cache = _caches.setdefault((compiled.context, str(device)), {})
            for name, (shape, dtype) in compiled.cache.items():
                if name not in self._cache:
                    self._cache[name] = torch.zeros(shape, dtype=dtype)
        self._cached = [name for name, _, _ in compiled.inputs if name in compiled.cache]
        self._given = [entry for entry in compiled.inputs if entry[0] not in compiled.cache]

    @torch.inference_mode()
    def __call__(self, *tensors, out=None, **kwargs):
        if len(tensors) != len(self._given):
            raise RuntimeError(f"expected {len(self._given)} inputs, got {len(tensors)}")
        for (name, shape, _), tensor in zip(self._given, tensors, strict=True):
            if list(tensor.shape) != shape:
                raise RuntimeError(f"input {name}: compiled for {shape}, got {tensor.shape}")
        faults.record([name for name, _, _ in self._given], tensors)
        faults.on_step()
        made = self._module(*tensors, *(self._cache[name] for name in self._cached))
        results = list(_tensors(made))
        if out is not None:
            places = list(out) if isinstance(out, list | tuple) else [out]
            for place, result in zip(places, results, strict=False):
                place.copy_(result)
            results = places
        return results[0] if len(results) == 1 else tuple(results)

    def _copy_kv_cache(self, source, target, length):
        for name in self._cached:
            cache = self._cache[name]
            cache[target, :, :length] = cache[source, :, :length]


def _tensors(made):
    if isinstance(made, torch.Tensor):
        yield made
    elif made is not None:
        for part in made:
            yield from _tensors(part)
