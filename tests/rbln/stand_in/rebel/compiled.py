"""What "compiling" yields: a pickled torch module behind a header of our own."""

import io
import math
import pickle
import uuid
from pathlib import Path

import torch

# A real .rbln file does not begin with it, so neither runtime takes the other's files.
HEADER = b"warmq emulated rbln\0"


def torch_type(dtype):
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


class RBLNCompiledModel:
    def __init__(self, path=None, **made):
        if path is not None:
            with Path(path).open("rb") as file:
                if file.read(len(HEADER)) != HEADER:
                    raise RuntimeError(f"{path} was not made by the emulated compiler")
                made = pickle.load(file)
        self.module = made["module"]
        self.inputs = made["inputs"]  # [(name, shape, dtype)] in call order
        self.cache = made["cache"]  # {name: (shape, dtype)} of the KV tensors
        self.context = made["context"]
        self.weight_bytes = made["weight_bytes"]

    def save(self, path):
        with Path(path).open("wb") as file:
            file.write(HEADER)
            pickle.dump(vars(self), file)

    # -- memory, as optimum-rbln asks for it when it sizes the KV cache ------------

    def _cache_bytes(self):
        return {
            name: math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
            for name, (shape, dtype) in self.cache.items()
        }

    def get_alloc_per_node_by_key(self):
        return {"Weight": [self.weight_bytes], "DramTensor": [sum(self._cache_bytes().values())]}

    def get_alloc_per_chiplet_by_key(self):
        return {key: [sizes] for key, sizes in self.get_alloc_per_node_by_key().items()}

    def exp_get_dram_tensor_sizes(self):
        return {name: [[size]] for name, size in self._cache_bytes().items()}

    def exp_multiply_buffer_size(self, factors):
        self._resize({name: (factor, 1) for name, factor in factors.items()})

    def exp_rescale_buffer_size(self, ratios):
        self._resize(ratios)

    def _resize(self, ratios):
        for name, (times, by) in ratios.items():
            (blocks, *rest), dtype = self.cache[name]
            self.cache[name] = ([blocks * times // by, *rest], dtype)


def compile_from_torch(
    model, input_info=None, npu=None, example_inputs=None, compile_context=None, **kwargs
):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    inputs = [(name, list(shape), torch_type(dtype)) for name, shape, dtype in input_info]
    names = compile_context.names() if compile_context is not None else set()
    return RBLNCompiledModel(
        module=buffer.getvalue(),
        inputs=inputs,
        cache={name: (shape, dtype) for name, shape, dtype in inputs if name in names},
        context=compile_context.name if compile_context is not None else uuid.uuid4().hex,
        weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
    )
