"""Special tokens of a model that the text of a row spells, such as `<|im_start|>` in a page about chat templates."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

from cbatch.errors import RowError

# Private characters stand for special tokens: the n-th of one plane for the n-th token where a text only spells it, the n-th
# of the other plane for the token itself. https://www.unicode.org/faq/private_use.html
_SPELLED, _MEANT = 0xF0000, 0x100000
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
_CONTROL = re.compile(r"<[|\N{FULLWIDTH VERTICAL LINE}].*[|\N{FULLWIDTH VERTICAL LINE}]>", re.DOTALL)


class SpecialTokens:
    """Tells the special tokens that a text only spells from those that a chat template writes.

    `hide` marks the first kind before the template is rendered, and `encode` makes plain text of what was marked. Both are
    exact: `encode` uses the same tokenizer, but for the names of its special tokens. Where these are found in a normalized
    text, or as words only, it can't be done.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.ids = {token.content: index for index, token in added.items() if _is_special(token)}
        longest_first = sorted(map(re.escape, self.ids), key=len, reverse=True)
        self._pattern = re.compile("|".join(longest_first) or "(?!)")
        self.can_hide = hasattr(tokenizer, "backend_tokenizer") and not any(
            token.single_word or (token.normalized and tokenizer.backend_tokenizer.normalizer)
            for index, token in added.items()
            if index in self.ids.values()
        )
        self._spelled = {text: chr(_SPELLED + index) for index, text in enumerate(self.ids)}
        self._meant = {text: chr(_MEANT + index) for index, text in enumerate(self.ids)}
        self._texts = {ord(mark): text for text, mark in self._spelled.items()}  # by what stands for them

    def are_in(self, value: Any) -> bool:
        """Whether a text spells a special token, or any text inside lists and objects does."""
        if isinstance(value, str):
            return bool(self._pattern.search(value))
        if isinstance(value, dict):
            return any(map(self.are_in, value)) or any(map(self.are_in, value.values()))
        return isinstance(value, (list, tuple)) and any(map(self.are_in, value))

    def hide(self, value: Any) -> Any:
        """A value whose texts have a mark in the place of every special token; RowError if they have such marks already."""
        if isinstance(value, str):
            if _PRIVATE.search(value):
                raise RowError(
                    "invalid_prompt", "a special token and private-use characters in one prompt can't be told apart"
                )
            return self._pattern.sub(lambda match: self._spelled[match[0]], value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, (list, tuple)) else value

    def shown(self, text: str) -> str:
        """A text with what it spells in the place of the marks."""
        return text.translate(self._texts)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The token ids of a text in which special tokens are meant, unless they are marked."""
        text = self._pattern.sub(lambda match: self._meant[match[0]], text)
        ids = self._renamed.encode(self.shown(text), add_special_tokens=add_special_tokens).ids
        return [self._own_ids.get(token, token) for token in ids]

    @cached_property
    def _renamed(self) -> Any:
        """The tokenizer under which special tokens are spelled by private characters, and their names are plain text."""
        from tokenizers import Tokenizer

        parts = json.loads(self._tokenizer.backend_tokenizer.to_str())
        parts["truncation"] = parts["padding"] = None
        for token in parts["added_tokens"]:
            token["content"] = self._meant.get(token["content"], token["content"])
        if (unknown := parts["model"].get("unk_token")) is not None:
            parts["model"]["unk_token"] = self._meant.get(unknown, unknown)
        vocabulary = parts["model"].get("vocab")
        if isinstance(vocabulary, dict):
            parts["model"]["vocab"] = {self._meant.get(text, text): index for text, index in vocabulary.items()}
        elif vocabulary:  # Unigram: pairs of a text and its score
            parts["model"]["vocab"] = [[self._meant.get(text, text), score] for text, score in vocabulary]
        return Tokenizer.from_str(json.dumps(parts))

    @cached_property
    def _own_ids(self) -> dict[int, int]:
        """The ids of added tokens, by those that the renamed tokenizer gives them."""
        added = self._tokenizer.added_tokens_decoder
        renamed = {index: self._meant.get(token.content, token.content) for index, token in added.items()}
        return {self._renamed.token_to_id(text): index for index, text in renamed.items()}


def _is_special(token: Any) -> bool:
    """Whether an added token is special: by its tokenizer's word, or written like <|user|>, which some do not call so."""
    return bool(token.content) and bool(token.special or _CONTROL.fullmatch(token.content))
