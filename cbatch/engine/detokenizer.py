"""Finds stop texts in a completion while its tokens arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_LONGEST_CHARACTER = 4  # bytes of a character in UTF-8, so at most as many tokens


class StopFinder:
    """Finds the first stop text in a completion that grows token by token, across token borders.

    Each token is decoded together with the few before it that its text may depend on, so the cost of a completion is
    linear in its length. Text is held back while it ends in an incomplete character, but no longer than a character
    can be. A match found this way is only a reason to look at the whole: the returned text and the place of the cut
    always come from one decode of all ids. A stop text counts only behind the first `min_tokens` tokens.
    """

    def __init__(self, decode: Decode, stop: Sequence[str], min_tokens: int = 0) -> None:
        self._decode, self._stop, self._min_tokens = decode, stop, min_tokens
        self._keep = max(map(len, stop)) - 1  # characters that may begin a match
        self._ids: list[int] = []
        self._start = self._end = 0  # ids[start:end] is the context that the next text is decoded with
        self._tail = ""

    def add(self, token: int) -> bool:
        """Append a token; returns whether the completion now holds a stop text."""
        self._ids.append(token)
        context = self._decode(self._ids[self._start : self._end])
        text = self._decode(self._ids[self._start :])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(self._ids) - self._end < _LONGEST_CHARACTER:
            return False
        self._start, self._end = self._end, len(self._ids)
        if len(self._ids) <= self._min_tokens:
            return False
        self._tail += text[len(context) :]
        found = any(stop in self._tail for stop in self._stop)
        self._tail = self._tail[-self._keep :] if self._keep else ""
        return found and self.cut(self._decode(self._ids)) is not None

    def cut(self, text: str) -> str | None:
        """The text of the whole completion up to the first stop text in it, or None if there is none."""
        start = len(self._decode(self._ids[: self._min_tokens])) if self._min_tokens else 0
        places = [place for place in (text.find(stop, start) for stop in self._stop) if place >= 0]
        return text[: min(places)] if places else None
