"""Whether the tokenizer that transformers makes of a checkpoint's files is the one that these files describe."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

_PACKAGES = {".model": ("sentencepiece", "protobuf"), ".tiktoken": ("tiktoken",)}  # that make a tokenizer of such files
_MODULES = {"protobuf": "google.protobuf"}
_PROBE = "The rain in Spain, 1984: it's (almost) 25% of what_we know.\n\tdef f(x): return x"


def check_tokenizer(tokenizer: Any, file: Path) -> None:
    """ValueError if a tokenizer has no vocabulary, or spoils texts that `file`, its tokenizer.json, does not.

    transformers makes one without words where the file with them is missing, and lets the class that
    tokenizer_config.json names replace parts of tokenizer.json.
    """
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):
        raise ValueError("it has no vocabulary; tokenizer.json is missing, or the file that holds it")
    if not file.is_file() or not hasattr(tokenizer, "backend_tokenizer"):
        return
    from tokenizers import Tokenizer

    written = Tokenizer.from_file(str(file))
    if not _keeps(written):  # a vocabulary for other texts than this one
        return
    try:
        is_kept = _keeps(tokenizer.backend_tokenizer)
    except Exception:  # of no class of its own: a token for unknown text is missing
        is_kept = False
    if not is_kept:
        raise ValueError(
            f"as {type(tokenizer).__name__}, which tokenizer_config.json names, it is another one than tokenizer.json "
            "describes; mend tokenizer_class"
        )


def _keeps(tokenizer: Any) -> bool:
    """Whether a text comes back from its token ids, but for capitals and spaces."""
    ids = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    return _plain(tokenizer.decode(ids)) == _plain(_PROBE)


def _plain(text: str) -> str:
    return "".join(text.split()).casefold()


def missing_packages(folder: Path) -> str:
    """What to install if a folder's tokenizer is in a file that only other packages read; empty if it is not."""
    if not folder.is_dir() or (folder / "tokenizer.json").is_file():
        return ""
    for file in sorted(folder.iterdir()):
        missing = [name for name in _PACKAGES.get(file.suffix, ()) if not _is_there(_MODULES.get(name, name))]
        if missing:
            return f" (there is no tokenizer.json, and {file.name} needs: pip install {' '.join(missing)})"
    return " (there is no tokenizer.json)"


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor the package that it would be in
        return False
