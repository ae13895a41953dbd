"""What a file is by its first bytes, where that is not what its name says."""

from __future__ import annotations

import json
import re

HEAD = 1 << 16  # bytes that are looked at

_PARQUET = b"PAR1"
_KINDS = (  # first bytes, what they say, what to do
    (b"version https://git-lfs.github.com/spec/", "a Git LFS pointer, not the file itself", "run git lfs pull"),
    (b"BZh", "compressed with bzip2", "use bzcat, or gzip or zstd"),
    (b"\xfd7zXZ\0", "compressed with xz", "use xzcat, or gzip or zstd"),
    (b"\x04\x22\x4d\x18", "compressed with lz4", "use lz4cat, or gzip or zstd"),
    (b"PK\x03\x04", "a zip archive", "unpack it"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it"),
    (_PARQUET, "Parquet", "let its name end in .parquet"),
    (b"ARROW1", "an Arrow file", "write it as Parquet"),
    (b"SQLite format 3\0", "an SQLite database", "write its rows as JSONL"),
    (b"%PDF-", "a PDF document", "write its text as JSONL"),
    (b"\xff\xfe\0\0", "UTF-32 text", "convert it: iconv -f UTF-32 -t UTF-8"),
    (b"\0\0\xfe\xff", "UTF-32 text", "convert it: iconv -f UTF-32 -t UTF-8"),
    (b"\xff\xfe", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
)
_NULS_OF_LATIN, _NULS_OF_OTHERS = 0.4, 0.02  # least share of the bytes of text in UTF-16 or UTF-32
_NULS_OF_HIGH_BYTES = 0.8  # least share of them that are the high bytes of Latin characters
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f]")


def foreign_kind(head: bytes, kind: str) -> str | None:
    """What a file is, and what to do, if its first bytes tell that it is not of this kind of source; else None."""
    if kind == "parquet" and head.startswith(_PARQUET):
        return None
    for start, what, remedy in _KINDS:
        if head.startswith(start):
            return f"is {what}: {remedy}"
    if head[257:262] == b"ustar":
        return "is a tar archive: unpack it"
    if encoding := _unmarked_encoding(head):
        return f"is {encoding} text: convert it: iconv -f {encoding} -t UTF-8"
    return _one_value(head) if kind == "jsonl" else None


def _unmarked_encoding(head: bytes) -> str | None:
    """The encoding of text with two or four bytes for each character and no byte-order mark: every other byte of Latin
    text is NUL, and some are where there are spaces and line ends in other text.
    """
    num_nul = head.count(0)
    if num_nul < len(head) * (_NULS_OF_LATIN if _is_utf8(head) else _NULS_OF_OTHERS) or not num_nul:
        return None
    for encoding, width in (("UTF-32LE", 4), ("UTF-32BE", 4), ("UTF-16LE", 2), ("UTF-16BE", 2)):
        text = head[: len(head) // width * width].decode(encoding, "replace").removesuffix("\ufffd")
        num_latin = sum(character < "\u0100" for character in text)
        if (
            "\ufffd" not in text
            and not _CONTROL.search(text)
            and num_latin * (width - 1) >= num_nul * _NULS_OF_HIGH_BYTES
        ):
            return encoding
    return None


def _is_utf8(head: bytes) -> bool:
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.end >= len(head) - 3 and error.start > 0  # the head ends in the middle of a character
    return True


def _one_value(head: bytes) -> str | None:
    """What JSON stretches over all lines, such as an array of objects or one object in a pretty form."""
    lines = [line for line in re.split(b"[\r\n]+", head.removeprefix(b"\xef\xbb\xbf")) if line.strip()][:2]
    first, second = (line.strip() for line in (*lines, b"", b"")[:2])
    if first == b"{" and second.startswith(b'"'):
        return "is one JSON object over several lines, but cbatch reads one object a line: use jq -c . FILE"
    is_array = first == b"[" or (re.match(rb"\[\s*\{", first) and not (second and _is_json(first)))
    return "is one JSON array, but cbatch reads one object a line: use jq -c '.[]' FILE" if is_array else None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
