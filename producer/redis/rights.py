"""What a user of Redis may do, found out by trying: docs/security.md lists what each side needs."""

import re

import orjson

from contract.errors import StoreForbidden
from contract.naming import RESULT_PREFIX
from contract.redis import keys
from contract.redis.reads import Reads

_KEY = keys.SCRATCH
_RESULT = f"{RESULT_PREFIX}warmq-scratch"
#: What a producer runs, in forms that change nothing: see rights.lua.
OF_PRODUCERS = tuple(
    line.format(key=_KEY).split()
    for line in """
    set {key} 1
    get {key}
    getrange {key} 0 0
    mget {key}
    incr {key}
    exists {key}
    pexpire {key} 60000
    pttl {key}
    persist {key}
    hget {key} f
    hset {key} f v
    hdel {key} f
    hexists {key} f
    hgetall {key}
    hmget {key} f
    hscan {key} 0
    hincrby {key} f 1
    lindex {key} 0
    llen {key}
    lrange {key} 0 0
    lpop {key}
    lpush {key} v
    rpush {key} v
    lmove {key} {key} LEFT LEFT
    lset {key} 0 v
    sadd {key} m
    smembers {key}
    zadd {key} 1 m
    zrange {key} 0 0
    zrem {key} m
    zrevrange {key} 0 0
    zscore {key} m
    publish {key} v
    del {key}
    unlink {key}
    """.strip().splitlines()
)
#: What only a worker runs, as far as a script may run it.
OF_WORKERS = tuple(
    line.format(key=_KEY).split()
    for line in """
    set {key} 1
    incrby {key} 1
    rename {key} {key}
    hkeys {key}
    hrandfield {key} 1
    ltrim {key} 0 0
    sismember {key} m
    srandmember {key} 1
    srem {key} m
    zcard {key}
    zincrby {key} 1 m
    zmscore {key} m
    zrandmember {key} 1
    zrangebyscore {key} 0 0
    zremrangebyscore {key} 0 0
    """.strip().splitlines()
)
#: What only a gateway runs, as far as a script may run it.
OF_GATEWAYS = tuple(
    line.format(key=_KEY).split()
    for line in """
    hlen {key}
    zcard {key}
    expireat {key} 9999999999
    hvals {key}
    srem {key} m
    zrangebyscore {key} 0 0
    zremrangebyscore {key} 0 0
    zrank {key} m
    zrevrank {key} m
    """.strip().splitlines()
)
_KEYS_OF_CELERY = ("_kombu.binding.scratch", "scratch.celery.pidbox")
#: How Redis 6.2 and later, and Valkey, refuse a command, key or channel within a script.
_REFUSED = re.compile(r"NOPERM|user executing the script|ACL failure|no permissions", re.IGNORECASE)


def missing(store: Reads, queue: str, *, worker: bool) -> list[str]:
    """Return what a producer with this queue needs and is not allowed; with `worker` also for one.

    Commands are told by their names, keys as `~key`, channels as `&channel`. Redis notes each
    refusal in its ACL LOG.

    Raises:
        StoreUnavailable: Redis cannot be used.
    """
    tried = [*OF_PRODUCERS, ["exists", queue], ["exists", _RESULT], ["publish", _RESULT, ""]]
    if worker:
        tried += [*OF_WORKERS, *(["exists", name] for name in _KEYS_OF_CELERY)]
    try:
        said = store._client.run_script("rights", orjson.dumps(tried))
    except StoreForbidden:
        return ["evalsha", "script|load"]
    found: list[str] = []
    for words, text in zip(tried, map(bytes.decode, said), strict=True):
        command, name = words[:2]
        if _REFUSED.search(text) and command not in found:
            sign = "&" if command == "publish" else "~"
            # One for a key or channel only if the command may be used on others.
            found.append(command if name in (_KEY, "STREAMS") else sign + name)
    return found
