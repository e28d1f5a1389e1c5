"""Names the tensors that live on the device across calls: the KV cache."""

import uuid


class CompileContext:
    def __init__(self, *args, **kwargs):
        self.name = uuid.uuid4().hex
        self.on_device = {}  # id -> (name, tensor): kept, so that no id is used twice

    def mark_static_address(self, tensor, name=None):
        self.on_device[id(tensor)] = (name, tensor)

    def names(self):
        return {name for name, _ in self.on_device.values()}
