"""The longest text that a number of tokens can hold, so that a longer one need not be tokenized to be refused."""

from __future__ import annotations

import json
from typing import Any

_LEAST = 4 * 1024**2  # bytes that are always tokenized
_LIKELY = 64  # bytes of a token on average that no ordinary text reaches
_COMPOSED = 3  # bytes of a text to one of its NFC: K, the kelvin sign; U+0390; most are far from that
# Steps of a tokenizer that leave no part of a text out, and how many bytes of a text one byte of the result may stand for.
_NORMALIZERS = {"NFC": _COMPOSED, "Prepend": 1, "Replace": 1}
_PRE_TOKENIZERS = ("ByteLevel", "Split", "Digits", "Metaspace")


def most_bytes(tokenizer: Any, num_tokens: int) -> int:
    """The bytes that a text of `num_tokens` tokens has at most.

    Exact where every byte of a text is part of a token, so that the longest token of the vocabulary is the bound. Where a
    tokenizer may leave something out, such as white space, it is a length that only a freak of a text could have.
    """
    longest = _longest_token(tokenizer)
    return num_tokens * longest if longest else max(_LEAST, num_tokens * _LIKELY)


def _longest_token(tokenizer: Any) -> int | None:
    """The most bytes of a text that become one token; None if there may be no such limit."""
    from tokenizers.pre_tokenizers import ByteLevel

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values()):
        return None
    shrinks = 1
    for step in _steps(backend.normalizer, "normalizers"):
        if step["type"] not in _NORMALIZERS or not _is_growing(step):
            return None
        shrinks *= _NORMALIZERS[step["type"]]
    pre_tokenizers = _steps(backend.pre_tokenizer, "pretokenizers")
    if any(step["type"] not in _PRE_TOKENIZERS or step.get("behavior") == "Removed" for step in pre_tokenizers):
        return None
    vocabulary = tokenizer.get_vocab()
    if any(step["type"] == "ByteLevel" for step in pre_tokenizers):
        names_of_bytes = ByteLevel.alphabet()
    elif getattr(backend.model, "byte_fallback", False):
        names_of_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return None
    if any(name not in vocabulary for name in names_of_bytes):  # such a byte is left out
        return None
    return shrinks * max(len(text.encode(errors="replace")) for text in vocabulary)


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer, one after another; `name` is what a sequence calls them."""
    if part is None:
        return []
    step = json.loads(part.__getstate__())
    return step[name] if step["type"] == "Sequence" else [step]


def _is_growing(step: dict[str, Any]) -> bool:
    """Whether a replacement puts at least as many bytes in the place of what it replaces."""
    if step["type"] != "Replace":
        return True
    pattern = step["pattern"].get("String")
    return pattern is not None and len(step["content"].encode()) >= len(pattern.encode())
