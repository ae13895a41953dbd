"""Measures what 8 bits cost in quality: perplexity, and how often the likeliest token is that of float32.

    PYTHONPATH=. python -m tests.quality MODEL [--windows 32] [--threads N]

The text is that of Python's own library, in windows of 1,024 tokens, each on its own. All tokens of a window are known to
the model before the one that is asked for (teacher forcing), so that an early difference does not count again and again.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cbatch.config import EngineConfig
from cbatch.engine.places import find_places
from cbatch.engine.plan import resolve
from cbatch.engine.start import start_engine
from cbatch.model.batch import single
from cbatch.model.loader import locate
from cbatch.watch.stats import EngineStats

_TEXTS = ("argparse", "inspect", "tarfile", "typing")
_WINDOW = 1024
_SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, --quantization int8": {"dtype": "bfloat16", "quantization": "int8"},
    "bfloat16, --kv-cache-dtype int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "bfloat16, both": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
}


def windows(tokenizer: Any, count: int) -> torch.Tensor:
    """[count, _WINDOW] token ids; fewer if the text ends."""
    text = "\n".join((Path(os.__file__).parent / f"{name}.py").read_text(encoding="utf-8") for name in _TEXTS)
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    count = min(count, len(ids) // _WINDOW)
    return torch.tensor(ids[: count * _WINDOW]).view(count, _WINDOW)


@torch.inference_mode()
def logits(engine: Any, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """[_WINDOW, vocabulary] float32 of each window."""
    block_size, device = engine.scheduler.pool.block_size, engine.runner.device
    batch = single(0, _WINDOW, -(-_WINDOW // block_size), block_size, device)
    for window in ids.to(device):
        yield engine.runner.forward(replace(batch, input_ids=window)).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    files = locate(options.model)
    ids = windows(files.tokenizer, options.windows)
    print(f"{ids.numel():,} tokens in {len(ids)} windows of {_WINDOW:,}")
    expected: list[torch.Tensor] = []
    for name, settings in _SETTINGS.items():
        config = EngineConfig(model=options.model, device="cpu", threads=options.threads, max_num_seqs=1, **settings)
        plan = resolve(config, find_places(config), files, _WINDOW)
        engine = start_engine(plan, plan.places[0], files, EngineStats())
        loss, same = 0.0, 0
        for number, (window, scores) in enumerate(zip(ids, logits(engine, ids), strict=True)):
            loss += torch.nn.functional.cross_entropy(scores[:-1], window[1:], reduction="sum").item()
            likeliest = scores.argmax(-1)
            if name == "float32":
                expected.append(likeliest)
            same += int((likeliest == expected[number]).sum())
        perplexity = math.exp(loss / (ids.numel() - len(ids)))
        print(
            f"{name:<32} perplexity {perplexity:7.4f}   likeliest token as in float32 {same / ids.numel():.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
