"""Rendezvous scores: a 64-bit number for each pair of an adapter and a worker that every agent computes alike.

Version 1, exactly, so that another implementation can agree (`tests/core/vectors/placement-v1.json` has values for it):

- a digest is BLAKE2b with 8 bytes of output, no key, read as a big-endian unsigned number, over parts that are each
  their length in bytes as 4 bytes big-endian, then the bytes (UTF-8);
- an adapter's parts are "lora-sidecar/hrw/v1", "adapter", namespace, name; a worker's are
  "lora-sidecar/hrw/v1", "worker", name;
- the score is splitmix64's output function of the two digests' exclusive or.

Framing keeps ("a", "bc") and ("ab", "c") apart. Digests come first so that a pair costs a few multiplications instead
of a hash; the mixing at the end is what makes them independent: names that differ in their last character only, such
as a StatefulSet's pods, would else get nearly the same rank for every adapter.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

# One of two dozen that were tried: under it usual names (adapter-7 on worker-2) come out evenly in small pools as well,
# where a hash that is no more than random gives one worker of five a share of 13 in 30 now and then.
VERSION_TAG = "lora-sidecar/hrw/v1"

# splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK = (1 << 64) - 1


def _digest(*parts: str) -> int:
    hasher = hashlib.blake2b(digest_size=8)
    for part in (VERSION_TAG, *parts):
        data = part.encode()
        hasher.update(len(data).to_bytes(4, "big"))
        hasher.update(data)
    return int.from_bytes(hasher.digest(), "big")


@lru_cache(maxsize=16_384)
def adapter_hash(namespace: str, name: str) -> int:
    """The digest of an adapter's identity, 0 <= value < 2**64. Cached: each placement asks for the same ones."""
    return _digest("adapter", namespace, name)


@lru_cache(maxsize=4_096)
def worker_hash(name: str) -> int:
    """The digest of a worker's stable name (pod name, not IP or UID), 0 <= value < 2**64."""
    return _digest("worker", name)


def score(adapter: int, worker: int) -> int:
    """How much a worker suits an adapter, 0 <= value < 2**64, from their digests; the higher the better."""
    mixed = ((adapter ^ worker) + GAMMA) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * MIX_1) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * MIX_2) & MASK
    return mixed ^ (mixed >> 31)
