"""The text of a completion, and the stop texts in it while its tokens arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_LONGEST_CHARACTER = 4  # bytes of a character in UTF-8, so at most as many tokens
_CONTEXT = 8  # tokens of the prompt, of which one at least should have a text


class CompletionText:
    """Decodes the tokens of a completion: the text is what they add to the prompt's.

    Some decoders (SentencePiece's) drop the space that begins a text; it is no beginning if a prompt comes before it.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        self.decode, self.context = decode, list(prompt[-_CONTEXT:])

    def __call__(self, token_ids: Sequence[int]) -> str:
        """The text of the first tokens of a completion, or of all."""
        text = self.decode(token_ids)
        if not token_ids or not self.context:
            return text
        before, whole = self.decode(self.context), self.decode([*self.context, *token_ids])
        return f" {text}" if whole == f"{before} {text}" else text

    def fewest(self, token_ids: list[int], text: str) -> list[int]:
        """The fewest leading tokens whose text holds `text`, which is the beginning of that of all."""
        count = len(token_ids)
        while count and self(token_ids[: count - 1]).startswith(text):
            count -= 1
        return token_ids[:count]


class StopFinder:
    """Finds the first stop text in a completion that grows token by token, across token borders.

    Each token is decoded together with the few before it that its text may depend on, so the cost of a completion is
    linear in its length. Text is held back while it ends in an incomplete character, but no longer than a character
    can be. A match found this way is only a reason to look at the whole: the returned text and the place of the cut
    always come from one decode of all tokens. A stop text counts only behind the first `min_tokens` tokens.
    """

    def __init__(self, text_of: CompletionText, stop: Sequence[str], min_tokens: int = 0) -> None:
        self._text_of, self._stop, self._min_tokens = text_of, stop, min_tokens
        self._keep = max(map(len, stop)) - 1  # characters that may begin a match
        self._ids = list(text_of.context)  # then those of the completion
        self._first = len(self._ids)
        self._start, self._end = 0, self._first  # ids[start:end] is the context that the next text is decoded with
        self._tail = ""

    def add(self, token: int) -> bool:
        """Append a token; returns whether the completion now holds a stop text."""
        self._ids.append(token)
        context = self._text_of.decode(self._ids[self._start : self._end])
        text = self._text_of.decode(self._ids[self._start :])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(self._ids) - self._end < _LONGEST_CHARACTER:
            return False
        self._start, self._end = self._end, len(self._ids)
        if len(self._ids) - self._first <= self._min_tokens:
            return False
        self._tail += text[len(context) :]
        found = any(stop in self._tail for stop in self._stop)
        self._tail = self._tail[-self._keep :] if self._keep else ""
        return found and self.cut(self._text_of(self._ids[self._first :])) is not None

    def cut(self, text: str) -> str | None:
        """The text of the whole completion up to the first stop text in it, or None if there is none."""
        early = self._ids[self._first : self._first + self._min_tokens]
        start = len(self._text_of(early)) if early else 0
        places = [place for place in (text.find(stop, start) for stop in self._stop) if place >= 0]
        return text[: min(places)] if places else None
