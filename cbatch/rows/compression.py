"""gzip and zstd streams -> their content, up to the last byte before a fault.

A library that meets a fault throws away what it had decompressed in that call. Here all of it comes out before the
exception does, so that every whole line before the fault is read.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

_CHUNK = 1 << 16
_GZIP_MAGIC, _ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_GZIP = 31  # zlib's number for a gzip stream, whose header and checksum it checks
_NO_BYTE_OF_A_LINE = b"\xff"  # at its end: a whole line ends in a newline


def decompressed(file: Any) -> io.BufferedReader:
    """The content of a file or a pipe: decompressed if its first bytes say gzip or zstd, whatever its name."""
    start = b""
    while len(start) < 4 and (more := file.read1(_CHUNK)):
        start += more
    plain = _reader(chain([start], iter(lambda: file.read1(_CHUNK), b"")))
    if start.startswith(_GZIP_MAGIC):
        return _reader(_gunzip(plain))
    return _reader(_unzstd(plain)) if is_compressed(start) else plain


def is_compressed(start: bytes) -> bool:
    """Whether a file that begins so is one that `decompressed` decompresses."""
    return start.startswith((_GZIP_MAGIC, _ZSTD_MAGIC)) or _is_skippable(start)


def _reader(pieces: Iterator[bytes]) -> io.BufferedReader:
    return io.BufferedReader(_Pieces(pieces), _CHUNK)


class _Pieces(io.RawIOBase):
    """An iterator of bytes as a file. Its exception comes when all that it gave before has been read."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = piece
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _gunzip(file: io.BufferedReader) -> Iterator[bytes]:
    """The content of all members; zlib.error or EOFError at a fault. Zeros behind a member are padding, as in gzip."""
    decoder, in_member, data = zlib.decompressobj(_GZIP), False, b""
    while data := data or file.read1(_CHUNK):
        if not in_member and not (data := data.lstrip(b"\0")):
            continue
        before, in_member = decoder.copy(), True
        try:
            content = decoder.decompress(data, _CHUNK)
        except zlib.error:
            yield from _salvaged(before, data)
            raise
        yield content
        data = decoder.unconsumed_tail
        if decoder.eof:
            decoder, in_member, data = zlib.decompressobj(_GZIP), False, decoder.unused_data
    if in_member:
        yield decoder.flush()
        raise EOFError("the compressed file ends too early")


def _salvaged(decoder: Any, data: bytes) -> Iterator[bytes]:
    """What a decoder makes of data with a fault in it: in ever smaller pieces, then byte by byte."""
    size = len(data)
    while size and data:
        before = decoder.copy()
        try:
            yield decoder.decompress(data[:size])
            data = data[size:]
        except zlib.error:
            decoder, size = before, size // 2
    try:
        content = decoder.decompress(data[:1], 1)
        while content:
            yield content
            content = decoder.decompress(decoder.unconsumed_tail, 1)
    except zlib.error:
        pass


def _unzstd(file: io.BufferedReader) -> Iterator[bytes]:
    """The content of all frames; Arrow's error at a fault.

    Arrow is given one block at a time, as a fault spoils all that is decompressed together. What it has written into
    the buffer when it raises is followed by the bytes that were there before.
    """
    import pyarrow as pa

    stream = pa.CompressedInputStream(pa.PythonFile(_Blocks(file), "r"), "zstd")
    while True:
        buffer = bytearray(_NO_BYTE_OF_A_LINE * _CHUNK)
        try:
            size = stream.readinto(buffer)
        except (pa.ArrowException, OSError):
            yield bytes(buffer).rstrip(_NO_BYTE_OF_A_LINE)
            raise
        if not size:
            return
        yield bytes(buffer[:size])


class _Blocks:
    """A zstd file that gives at most one block at each read.

    Source: https://www.rfc-editor.org/rfc/rfc8878#name-zstandard-frames
    """

    closed = False

    def __init__(self, file: io.BufferedReader) -> None:
        self._pieces, self._rest = self._split(file), b""

    def read(self, size: int = -1) -> bytes:
        self._rest = self._rest or next(self._pieces, b"")
        size = min(_CHUNK, len(self._rest)) if size < 0 else size
        piece, self._rest = self._rest[:size], self._rest[size:]
        return piece

    def close(self) -> None:
        """Nothing: the file is its opener's."""

    def _split(self, file: io.BufferedReader) -> Iterator[bytes]:
        while magic := file.read(4):
            yield magic
            if _is_skippable(magic):
                yield (length := file.read(4))
                yield from _pieces(file, int.from_bytes(length, "little"))
            elif magic == _ZSTD_MAGIC:
                yield from self._frame(file)
            else:
                yield from iter(lambda: file.read(_CHUNK), b"")

    def _frame(self, file: io.BufferedReader) -> Iterator[bytes]:
        """The header of a frame, its blocks, its checksum."""
        yield (descriptor := file.read(1))
        flags = int.from_bytes(descriptor, "little")
        is_single, size_of_size = flags >> 5 & 1, flags >> 6
        yield file.read((not is_single) + (0, 1, 2, 4)[flags & 3] + (is_single, 2, 4, 8)[size_of_size])
        is_last = False
        while not is_last and (header := file.read(3)):
            number = int.from_bytes(header, "little")
            is_last, kind, size = bool(number & 1), number >> 1 & 3, number >> 3
            yield header + file.read(1 if kind == 1 else min(size, 1 << 21))
        if flags & 4:
            yield file.read(4)


def _pieces(file: io.BufferedReader, size: int) -> Iterator[bytes]:
    """The next `size` bytes of a file, or what there is of them."""
    while size > 0 and (piece := file.read(min(size, _CHUNK))):
        yield piece
        size -= len(piece)


def _is_skippable(magic: bytes) -> bool:
    """Whether a zstd frame of the user's own begins here, which decoders pass over."""
    return len(magic) >= 4 and magic[1:4] == b"\x2a\x4d\x18" and magic[0] & 0xF0 == 0x50
