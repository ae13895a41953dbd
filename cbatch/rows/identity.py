"""The name under which random numbers are drawn for a row."""

from __future__ import annotations

import hashlib
import json
from pathlib import PurePath

from cbatch.rows.request import Row
from cbatch.rows.values import as_text

_FILTER_BITS = 1 << 27  # 16 MiB; of a million identities about one in 10^6 is taken for one that was there before
_PROBES = 4  # bits of the filter for each identity


class Identities:
    """Gives every row an identity: its `id` or `custom_id`, else its file's name and its position in it.

    So a row keeps its random numbers when the input is reordered, moved or cut. A row whose identity an earlier row has
    already gets its place added, so that copies of a row differ. A Bloom filter (Bloom, CACM 1970) of fixed size
    remembers the identities; where it errs, a place is added that was not needed.
    """

    def __init__(self) -> None:
        self._filter = bytearray(_FILTER_BITS // 8)

    def identify(self, row: Row) -> str:
        """The identity of a row; to be called once for every row, in the order of the input."""
        name = as_text(row.data.get("custom_id", row.data.get("id")))
        identity = json.dumps(name) if isinstance(name, (str, int)) else f"{PurePath(row.source).name}:{row.index}"
        return identity if self._add(identity) else f"{identity}|{row.source}:{row.index}"

    def _add(self, identity: str) -> bool:
        """Remember an identity; False if it was there already."""
        digest = hashlib.blake2b(identity.encode(errors="replace"), digest_size=4 * _PROBES).digest()
        is_new = False
        for start in range(0, len(digest), 4):
            byte, bit = divmod(int.from_bytes(digest[start : start + 4], "little") % _FILTER_BITS, 8)
            is_new |= not self._filter[byte] >> bit & 1
            self._filter[byte] |= 1 << bit
        return is_new
