"""The torch.compile backend: runs the graph as it is."""


def rbln_backend(graph_module, example_inputs, **kwargs):
    return graph_module.forward
