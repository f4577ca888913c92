"""The hash chain of full blocks: equal hashes mean equal tokens from the very start, and the same extra keys."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16


def root_hash(cache_salt: str) -> bytes:
    """The chain's start.  Whatever changes the meaning of equal tokens (a tenant's salt) is an extra key in here."""
    return hashlib.blake2b(cache_salt.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).digest()


def next_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block whose predecessors have the hash `parent`."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()
