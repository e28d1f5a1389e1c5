"""The vendor's custom operators, written plainly: paged attention, linear, sampling."""

import torch

_PAGED = (
    "Tensor q, Tensor k, Tensor v, Tensor(a!) kcache, Tensor(b!) vcache, Tensor seq, "
    "Tensor scale, Tensor block_table, int block_size"
)
_OPTIONAL = "Tensor? mask=None, Tensor? s_aux=None"
_PARTITION = ", int partition=0"
_TWO_WAYS = ", bool is_bidirectional=False"
_ATTENTION = {
    "paged_causal_attn_prefill": _TWO_WAYS,
    "paged_causal_attn_decode": "",
    "paged_flash_causal_attn_prefill": _PARTITION + _TWO_WAYS,
    "paged_flash_causal_attn_decode": _PARTITION,
}
_EAGER = "CompositeExplicitAutograd"
_kept = []  # a Library that is collected takes its operators with it
_linear = torch.nn.functional.linear  # optimum-rbln replaces the one in torch


def paged_attention(q, k, v, kcache, vcache, seq, scale, block_table, block_size, *_, **__):
    """Write new keys and values into their pages, then attend causally to all pages.

    Shapes: q [rows, kv heads, group, new, dim]; k, v [rows, kv heads, 1, new, dim]; caches
    [blocks, kv heads, 1, block_size, dim]; seq: where the new tokens of a row begin.
    """
    tables = block_table.reshape(q.shape[0], -1).long()
    starts = seq.reshape(-1).tolist()
    out = torch.empty_like(q)
    for row, (table, start) in enumerate(zip(tables, starts, strict=False)):
        new = q.shape[3]
        room = table.numel() * block_size
        at = torch.arange(int(start), int(start) + new)
        fits = at < room  # the last prefill chunk is padded beyond the context
        block, offset = table[at[fits] // block_size], at[fits] % block_size
        kcache[block, :, 0, offset] = k[row, :, 0][:, fits].transpose(0, 1).to(kcache.dtype)
        vcache[block, :, 0, offset] = v[row, :, 0][:, fits].transpose(0, 1).to(vcache.dtype)
        used = table[: -(-min(int(start) + new, room) // block_size)]
        keys = kcache[used, :, 0].transpose(0, 1).flatten(1, 2).float()
        values = vcache[used, :, 0].transpose(0, 1).flatten(1, 2).float()
        scores = torch.einsum("hgnd,htd->hgnt", q[row].float(), keys) * scale.float()
        future = torch.arange(keys.shape[1])[None] > at[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        out[row] = torch.einsum("hgnt,htd->hgnd", weights, values).to(q.dtype)
    return out


def top_k_top_p(probabilities, k, p):
    # The engine warms up with uninitialised memory, so anything may come.
    weights = probabilities.float().nan_to_num(1e-6, 1e-6, 1e-6).clamp(min=1e-9)
    weights, tokens = weights.sort(dim=-1, descending=True)
    if k is not None:
        weights = weights.masked_fill(torch.arange(weights.shape[-1])[None] >= k.view(-1, 1), 0)
    if p is not None:
        weights = weights.masked_fill(weights.cumsum(-1) - weights > p.view(-1, 1), 0)
    return tokens.gather(-1, torch.multinomial(weights, 1)).squeeze(-1).to(torch.int32)


def argmax(logits):
    return logits.nan_to_num().argmax(-1).to(torch.int32)


def register():
    models = torch.library.Library("rbln_custom_ops", "DEF")
    for name, more in _ATTENTION.items():
        models.define(f"{name}({_PAGED}{more}, {_OPTIONAL}) -> Tensor")
        models.impl(name, paged_attention, _EAGER)
    models.define("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor")
    models.impl("linear", lambda input, weight, bias=None: _linear(input, weight, bias), _EAGER)

    sampling = torch.library.Library("rbln", "DEF")
    sampling.define("argmax(Tensor logits) -> Tensor")
    sampling.define("top_k_top_p(Tensor probs, Tensor? k, Tensor? p) -> Tensor")
    sampling.impl("argmax", argmax, _EAGER)
    sampling.impl("top_k_top_p", top_k_top_p, _EAGER)
    tokens = {"argmax": _tokens, "top_k_top_p": lambda x, k, p: _tokens(x)}
    for name, shape_only in tokens.items():
        sampling.impl(name, shape_only, "Meta")
    _kept.extend([models, sampling])
    _let_torchvision_import()


def _tokens(scores):
    return scores.new_empty(scores.shape[:-1], dtype=torch.int32)


def _let_torchvision_import():
    # The registry's torchvision is built for CUDA: its operators do not load beside a CPU
    # torch, and its Python side only wants these to be declared.
    vision = torch.library.Library("torchvision", "DEF")
    try:
        vision.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        vision.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except RuntimeError:
        return  # the real ones are there
    _kept.append(vision)
