"""The order of a file's requests in which equal beginnings come together, and what it saves.

The order is the depth-first walk of the tree of beginnings: the best one for a cache that drops
what was not used for longest (Zheng et al., "SGLang", theorem 3.1). Groups come in the order of
their first request in the file, requests within one in the file's order. It depends on nothing but
the records.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from contract.redis.batches import BatchStore
from producer.submit.order.keys import BLOCK_BYTES, BYTES_PER_TOKEN, depth_bytes
from producer.submit.order.records import Records
from producer.submit.submission import OrderOption

#: Tokens that the prefix cache is taken to hold where no worker tells: small, so that files are
#: put in order rather than not.
UNKNOWN_CACHE_TOKENS = 32_768
#: Of requests and of bytes of one text: half the memory of numpy's own choice.
_NUMBER = np.int32


@dataclass(frozen=True, slots=True)
class PrefixOrder:
    """`order` has the numbers of the requests (int64, from 0), the first to be queued first.

    Tokens are estimates from the texts' lengths. `prompt` is that of all prompts; of these the
    engine finds `saved_as_is` in its prefix cache in the file's order, `saved` in this order.
    `distinct` is the size of the shared beginnings, each once. `groups` requests' beginnings are
    shared by two or more, `group_tokens` long on average.
    """

    order: np.ndarray
    prompt: int
    saved: int
    saved_as_is: int
    distinct: int
    groups: int
    group_tokens: int

    @property
    def fingerprint(self) -> str:
        """16 hex digits that another order hardly has."""
        order = np.ascontiguousarray(self.order, dtype="<i8")
        return hashlib.blake2b(order.data, digest_size=8).hexdigest()

    @property
    def gain(self) -> float:
        """The share of prompt tokens that only this order saves."""
        return (self.saved - self.saved_as_is) / self.prompt if self.prompt else 0.0


@dataclass(slots=True)
class _Groups:
    """Requests that share a beginning with another one, group after group.

    `place` is where in the order they stand, `line` which they are; `group` is the index here at
    which their group begins. Lines rise within a group.
    """

    place: np.ndarray
    line: np.ndarray
    group: np.ndarray


def plan(records: Records, cache_tokens: int = UNKNOWN_CACHE_TOKENS) -> PrefixOrder:
    """Put the requests of a file in order; `cache_tokens` is what the prefix cache holds."""
    count, sizes = len(records), records.sizes()
    order = np.arange(count, dtype=_NUMBER)
    now = _Groups(order.copy(), order.copy(), np.zeros(count, dtype=_NUMBER))
    saved, as_is = np.zeros(count, dtype=_NUMBER), np.zeros(count, dtype=_NUMBER)
    # Of the smallest group that a line is in: its first line, and how much it shares.
    leaf, leaf_depth = np.full(count, -1, dtype=_NUMBER), np.zeros(count, dtype=_NUMBER)
    written, distinct = _written(records, sizes), 0
    for level in range(records.levels):
        keys = records.column(level)[now.line]
        now, keys = _split(now, keys)
        order[now.place] = now.line
        now, keys = _shared(now, keys)
        if not len(keys):
            break
        depth = depth_bytes(keys).astype(_NUMBER)
        later = now.group != np.arange(len(keys))
        saved[now.line[later]] = depth[later]
        distinct += int((depth - leaf_depth[now.line])[~later].sum(dtype=np.int64))
        apart = np.diff(written[now.line], prepend=0)
        near = later & (apart <= cache_tokens * BYTES_PER_TOKEN // BLOCK_BYTES)
        as_is[now.line[near]] = depth[near]
        leaf[now.line], leaf_depth[now.line] = now.line[now.group], depth
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
    )


def _written(records: Records, sizes: np.ndarray) -> np.ndarray:
    """Return what requests leave in the cache up to each one, in the file's order, in blocks:
    without what each shares with the one before it, which is there already."""
    new = sizes.astype(_NUMBER)
    same = np.ones(max(0, len(sizes) - 1), dtype=bool)
    for level in range(records.levels):
        keys = records.column(level)
        same &= (keys[1:] == keys[:-1]) & (keys[1:] != 0)
        if not same.any():
            break
        new[1:][same] = sizes[1:][same] - depth_bytes(keys[1:][same])
    return np.cumsum(new // BLOCK_BYTES, dtype=_NUMBER)


def _split(now: _Groups, keys: np.ndarray) -> tuple[_Groups, np.ndarray]:
    """Put equal keys of each group together, in the order of their first lines."""
    if not ((keys[1:] != keys[:-1]) & (now.group[1:] == now.group[:-1])).any():
        return now, keys
    by_key = np.lexsort((keys, now.group))  # stable: lines still rise among equal keys
    line, keys, group = now.line[by_key], keys[by_key], now.group[by_key]
    del by_key  # here the plan needs most memory
    begins = np.ones(len(keys), dtype=bool)
    begins[1:] = (keys[1:] != keys[:-1]) | (group[1:] != group[:-1])
    first = line[begins][np.cumsum(begins, dtype=_NUMBER) - 1]
    by_first = np.lexsort((first, group))
    del first, group
    line, keys, begins = line[by_first], keys[by_first], begins[by_first]
    del by_first
    starts = np.flatnonzero(begins).astype(_NUMBER)
    return _Groups(now.place, line, starts[np.cumsum(begins, dtype=_NUMBER) - 1]), keys


def _shared(now: _Groups, keys: np.ndarray) -> tuple[_Groups, np.ndarray]:
    """Leave out requests that are alone in their group, and those whose text has ended."""
    size = np.bincount(now.group, minlength=len(keys))[now.group]
    stays = (size > 1) & (keys != 0)
    if stays.all():
        return now, keys
    moved = np.cumsum(stays, dtype=_NUMBER) - 1
    return _Groups(now.place[stays], now.line[stays], moved[now.group[stays]]), keys[stays]


#: `auto` leaves a file as it is for less than this share of its prompt tokens.
LEAST_GAIN = 0.02
_INPUT, _PREFIX = "input", "prefix"


@dataclass(frozen=True, slots=True)
class OrderChoice:
    """`order` has the numbers of the requests, the first to be queued first; None for the file's
    own. `name` is what the batch keeps of it; an interrupted submit goes on by the same one."""

    name: str
    order: np.ndarray | None
    plan: PrefixOrder

    @property
    def in_groups(self) -> bool:
        """Whether it is another order than the file's."""
        return self.order is not None


def cache_tokens(store: BatchStore, queue: str) -> int:
    """Return how many tokens the smallest prefix cache of the queue's workers holds, 0 if they
    have none; UNKNOWN_CACHE_TOKENS where no worker tells."""
    return _smallest(store.workers(queue))


def _smallest(workers: Sequence[dict[str, Any]]) -> int:
    told = [w for w in workers if w.get("prefix_caching") is not None or w.get("kv_tokens")]
    caching = [w for w in told if w.get("prefix_caching") is not False]
    if told and not caching:
        return 0
    sizes = [w["kv_tokens"] for w in caching if isinstance(w.get("kv_tokens"), int)]
    return min(sizes, default=UNKNOWN_CACHE_TOKENS)


def choose_order(wish: OrderOption, records: Records, cache: int, earlier: str = "") -> OrderChoice:
    """Decide on an order; `earlier` is the name of the choice by which some messages are queued.

    `cache` is in tokens; 0 says that workers have no prefix cache, and nothing is gained.
    """
    found = plan(records, cache)
    wanted = wish == _PREFIX or (cache > 0 and found.gain >= LEAST_GAIN)
    if earlier:
        wanted = earlier != _INPUT
    if not wanted:
        return OrderChoice(_INPUT, None, found)
    return OrderChoice(f"{_PREFIX} {found.fingerprint}", found.order, found)
