"""What a file is by its first bytes, where that is not what its name says."""

from __future__ import annotations

import json
import re
from unicodedata import category

HEAD = 1 << 16  # bytes that are looked at

_PARQUET = b"PAR1"
_KINDS = (  # first bytes, what they say, what to do
    (b"version https://git-lfs.github.com/spec/", "a Git LFS pointer, not the file itself", "run git lfs pull"),
    (b"BZh", "compressed with bzip2", "use bzcat, or gzip or zstd"),
    (b"\xfd7zXZ\0", "compressed with xz", "use xzcat, or gzip or zstd"),
    (b"\x04\x22\x4d\x18", "compressed with lz4", "use lz4cat, or gzip or zstd"),
    (b"PK\x03\x04", "a zip archive", "unpack it"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it"),
    (b"\x1f\x8b\x08", "compressed twice", "decompress it"),
    (b"\x28\xb5\x2f\xfd", "compressed twice", "decompress it"),
    (_PARQUET, "Parquet", "let its name end in .parquet"),
    (b"ARROW1", "an Arrow file", "write it as Parquet"),
    (b"SQLite format 3\0", "an SQLite database", "write its rows as JSONL"),
    (b"%PDF-", "a PDF document", "write its text as JSONL"),
    (b"\xff\xfe\0\0", "UTF-32 text", "convert it: iconv -f UTF-32 -t UTF-8"),
    (b"\0\0\xfe\xff", "UTF-32 text", "convert it: iconv -f UTF-32 -t UTF-8"),
    (b"\xff\xfe", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
)
_NULS_OF_LATIN = 0.4  # least share of the bytes of Latin text in UTF-16 or UTF-32
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
    """The encoding of text with two or four bytes for each character and no byte-order mark, if the head can be read so
    and holds a NUL, as a space and a line end do there. What would be UTF-8 but for some NULs is not such text.
    """
    num_nul = head.count(0)
    if not num_nul or (_is_clean_utf8(head.replace(b"\0", b"")) and num_nul < len(head) * _NULS_OF_LATIN):
        return None
    for encoding, width in (("UTF-32LE", 4), ("UTF-32BE", 4), ("UTF-16LE", 2), ("UTF-16BE", 2)):
        text = head[: len(head) // width * width].decode(encoding, "replace").removesuffix("\ufffd")
        if text and ("\n" in text) == (b"\n" in head) and not any(map(_is_no_text, text)):
            return encoding
    return None


def _is_no_text(character: str) -> bool:
    """Whether a character is unassigned, private, a control character, or stands for what could not be read."""
    return character == "\ufffd" or (category(character) in ("Cc", "Cn", "Co") and character not in "\t\n\v\f\r")


def _is_clean_utf8(head: bytes) -> bool:
    """Whether this is UTF-8 without control characters, up to a character that the end of the head divides."""
    try:
        return not _CONTROL.search(head.decode())
    except UnicodeDecodeError as error:
        return error.start > 0 and error.end >= len(head) - 3 and not _CONTROL.search(head[: error.start].decode())


def _one_value(head: bytes) -> str | None:
    """What JSON stretches over all lines, such as an array of objects or one object in a pretty form."""
    lines = [line for line in re.split(b"[\r\n]+", head.removeprefix(b"\xef\xbb\xbf")) if line.strip()][:2]
    first, second = (line.strip() for line in (*lines, b"", b"")[:2])
    if first == b"{" and second.startswith(b'"'):
        return "is one JSON object over several lines, but cbatch reads one object a line: use jq -c . FILE"
    is_array = first == b"[" or (re.match(rb"\[\s*\{", first) and not (second and _is_json(first)))
    return "is one JSON array, but cbatch reads one object a line: use jq -c '.[]' FILE" if is_array else None


def holds_no_object(head: bytes) -> bool:
    """Whether these are several lines without a single object among them, such as CSV under another name."""
    return b"{" not in head and sum(bool(line.strip()) for line in head.split(b"\n")) > 1


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
