"""What a row is known by when random numbers are drawn for it."""

from __future__ import annotations

import hashlib
import json
from pathlib import PurePath

from cbatch.rows.request import Row

_BITS = 1 << 27  # 16 MiB; of a million identities about one in 10^6 is taken for one seen before
_PROBES = 4


class Identities:
    """Names rows by their `id` or `custom_id`, else by their file's name and their position in it.

    So a row keeps its random numbers when the input is reordered, moved or cut. An identity that an earlier row had
    already gets the row's place added, so that copies of a row differ. What was seen is kept in a Bloom filter (Bloom,
    CACM 1970) of fixed size; a false hit only adds the place where there was no need to.
    """

    def __init__(self) -> None:
        self._seen = bytearray(_BITS // 8)

    def of(self, row: Row) -> str:
        """The identity of a row; call it once for every row, in the order of the input."""
        name = row.data.get("custom_id", row.data.get("id"))
        identity = json.dumps(name) if isinstance(name, (str, int)) else f"{PurePath(row.source).name}:{row.index}"
        return f"{identity}|{row.source}:{row.index}" if self._was_seen(identity) else identity

    def _was_seen(self, identity: str) -> bool:
        digest = hashlib.blake2b(identity.encode(errors="replace"), digest_size=4 * _PROBES).digest()
        seen = True
        for start in range(0, len(digest), 4):
            byte, bit = divmod(int.from_bytes(digest[start : start + 4], "little") % _BITS, 8)
            seen &= bool(self._seen[byte] >> bit & 1)
            self._seen[byte] |= 1 << bit
        return seen
