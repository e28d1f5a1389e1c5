"""Orders a file's requests by prefix, and estimates the prompt tokens that this saves.

All requests of a model are next to each other, so that an adapter is loaded once (WARMQ_ADAPTERS).
Requests of a model that share a prefix are a group. The order is a depth-first walk of the tree of
prefixes, the best order for a cache that drops its least recently used blocks (Zheng et al.,
"SGLang", theorem 3.1). Groups are in the order of their first requests in the file, the requests of
a group in the file's order.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from contract.redis.batches import BatchStore
from producer.submit.order.keys import BLOCK_BYTES, BYTES_PER_TOKEN, depth_bytes
from producer.submit.order.prefix_keys import PrefixKeys
from producer.submit.submission import OrderOption

#: Assumed tokens of an unknown prefix cache: small, so that `auto` tends to order files.
UNKNOWN_CACHE_TOKENS = 32_768
#: Least share of its prompt tokens that an order must save for `auto` to use it.
LEAST_GAIN = 0.02
_INPUT, _PREFIX = "input", "prefix"
#: Type of line numbers and byte counts; it takes half the memory of numpy's default.
_NUMBER = np.int32


@dataclass(frozen=True, slots=True)
class PrefixOrder:
    """An order of requests. All tokens are estimates from the texts' lengths."""

    order: np.ndarray  # numbers of requests from 0 (int32), in the order of queueing
    prompt: int  # tokens of all prompts
    saved: int  # tokens found in the prefix cache in this order
    saved_as_is: int  # tokens found in the prefix cache in the file's order
    distinct: int  # tokens of shared prefixes, each prefix counted once
    groups: int  # number of prefixes that two or more requests share
    group_tokens: int  # mean tokens of these prefixes
    models: int  # number of models that the requests name
    changes: int  # number of requests in the file that name another model than the one before

    @property
    def fingerprint(self) -> str:
        """Digest of the order, 16 hex digits."""
        order = np.ascontiguousarray(self.order, dtype="<i8")
        return hashlib.blake2b(order.data, digest_size=8).hexdigest()

    @property
    def gain(self) -> float:
        """Share of prompt tokens that only this order saves."""
        return (self.saved - self.saved_as_is) / self.prompt if self.prompt else 0.0


@dataclass(slots=True)
class _Groups:
    """Requests that share a prefix with another one, sorted by group, then by line.

    Each request has its `place` in the order, its `line`, and in `group` the index in these arrays
    at which its group begins.
    """

    place: np.ndarray
    line: np.ndarray
    group: np.ndarray


def prefix_order(records: PrefixKeys, cache_tokens: int = UNKNOWN_CACHE_TOKENS) -> PrefixOrder:
    """Order the requests of a file; `cache_tokens` is the size of the prefix cache."""
    count, sizes = len(records), records.sizes()
    order = np.arange(count, dtype=_NUMBER)
    groups = _Groups(order.copy(), order.copy(), np.zeros(count, dtype=_NUMBER))
    saved, as_is = np.zeros(count, dtype=_NUMBER), np.zeros(count, dtype=_NUMBER)
    # leaf[i] and leaf_depth[i]: first line and shared bytes of the smallest group of line i.
    leaf, leaf_depth = np.full(count, -1, dtype=_NUMBER), np.zeros(count, dtype=_NUMBER)
    written, distinct = _blocks_written(records, sizes), 0
    models = records.models()
    groups, _ = _split(groups, models)
    order[groups.place] = groups.line
    for level in range(records.levels):
        keys = records.column(level)[groups.line]
        groups, keys = _split(groups, keys)
        order[groups.place] = groups.line
        groups, keys = _shared(groups, keys)
        if not len(keys):
            break
        depth = depth_bytes(keys).astype(_NUMBER)
        later = groups.group != np.arange(len(keys))
        saved[groups.line[later]] = depth[later]
        distinct += int((depth - leaf_depth[groups.line])[~later].sum(dtype=np.int64))
        apart = np.diff(written[groups.line], prepend=0)
        near = later & (apart <= cache_tokens * BYTES_PER_TOKEN // BLOCK_BYTES)
        as_is[groups.line[near]] = depth[near]
        leaf[groups.line], leaf_depth[groups.line] = groups.line[groups.group], depth
    grouped = leaf >= 0
    leaves, at = np.unique(leaf[grouped], return_index=True)
    shared = leaf_depth[grouped][at]
    return PrefixOrder(
        order,
        prompt=int(sizes.sum(dtype=np.int64)) // BYTES_PER_TOKEN,
        saved=int(saved.sum(dtype=np.int64)) // BYTES_PER_TOKEN,
        saved_as_is=int(as_is.sum(dtype=np.int64)) // BYTES_PER_TOKEN,
        distinct=distinct // BYTES_PER_TOKEN,
        groups=len(leaves),
        group_tokens=int(shared.mean()) // BYTES_PER_TOKEN if len(shared) else 0,
        models=int(models.max(initial=-1)) + 1,
        changes=int(np.count_nonzero(np.diff(models))),
    )


def _blocks_written(records: PrefixKeys, sizes: np.ndarray) -> np.ndarray:
    """Return the blocks written to the cache up to each request, in the file's order.

    Bytes that a request shares with the one before it are in the cache, and are not counted.
    """
    new = sizes.astype(_NUMBER)
    same = np.ones(max(0, len(sizes) - 1), dtype=bool)
    for level in range(records.levels):
        keys = records.column(level)
        same &= (keys[1:] == keys[:-1]) & (keys[1:] != 0)
        if not same.any():
            break
        new[1:][same] = sizes[1:][same] - depth_bytes(keys[1:][same])
    return np.cumsum(new // BLOCK_BYTES, dtype=_NUMBER)


def _split(groups: _Groups, keys: np.ndarray) -> tuple[_Groups, np.ndarray]:
    """Split each group by key, in the order of the new groups' first lines."""
    if not ((keys[1:] != keys[:-1]) & (groups.group[1:] == groups.group[:-1])).any():
        return groups, keys
    by_key = np.lexsort((keys, groups.group))  # stable: lines still rise among equal keys
    line, keys, group = groups.line[by_key], keys[by_key], groups.group[by_key]
    del by_key  # memory peaks here
    begins = np.ones(len(keys), dtype=bool)
    begins[1:] = (keys[1:] != keys[:-1]) | (group[1:] != group[:-1])
    first = line[begins][np.cumsum(begins, dtype=_NUMBER) - 1]
    by_first = np.lexsort((first, group))
    del first, group
    line, keys, begins = line[by_first], keys[by_first], begins[by_first]
    del by_first
    starts = np.flatnonzero(begins).astype(_NUMBER)
    return _Groups(groups.place, line, starts[np.cumsum(begins, dtype=_NUMBER) - 1]), keys


def _shared(groups: _Groups, keys: np.ndarray) -> tuple[_Groups, np.ndarray]:
    """Remove requests that are alone in their group, and those whose text has ended."""
    size = np.bincount(groups.group, minlength=len(keys))[groups.group]
    stays = (size > 1) & (keys != 0)
    if stays.all():
        return groups, keys
    moved = np.cumsum(stays, dtype=_NUMBER) - 1
    return _Groups(groups.place[stays], groups.line[stays], moved[groups.group[stays]]), keys[stays]


@dataclass(frozen=True, slots=True)
class OrderChoice:
    """The chosen order.

    `order` is None for the file's own order. A resumed submit finds the order by `name`.
    """

    name: str
    order: np.ndarray | None
    plan: PrefixOrder

    @property
    def in_groups(self) -> bool:
        """Whether the requests are ordered by prefix, not as in the file."""
        return self.order is not None


def cache_tokens(store: BatchStore, queue: str) -> int:
    """Return the tokens of the smallest prefix cache of a queue's workers; 0 if none has one.

    Returns UNKNOWN_CACHE_TOKENS if no worker announces the size of its cache.
    """
    workers = store.workers(queue)
    known = [w for w in workers if w.get("prefix_caching") is not None or w.get("kv_tokens")]
    caching = [w for w in known if w.get("prefix_caching") is not False]
    if known and not caching:
        return 0
    sizes = [w["kv_tokens"] for w in caching if isinstance(w.get("kv_tokens"), int)]
    return min(sizes, default=UNKNOWN_CACHE_TOKENS)


def choose_order(
    option: OrderOption, records: PrefixKeys, cache: int, earlier: str = ""
) -> OrderChoice:
    """Choose an order.

    `cache` is the size of the workers' prefix cache in tokens. If it is 0, workers have none, and
    `auto` changes the file's order only if its requests alternate between models. `earlier` is the
    name of the order of a submit that is resumed.
    """
    found = prefix_order(records, cache)
    alternates = found.changes >= max(1, found.models)
    by_prefix = option == _PREFIX or alternates or (cache > 0 and found.gain >= LEAST_GAIN)
    if earlier:
        by_prefix = earlier != _INPUT
    if not by_prefix:
        return OrderChoice(_INPUT, None, found)
    return OrderChoice(f"{_PREFIX} {found.fingerprint}", found.order, found)
