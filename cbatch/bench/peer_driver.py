"""Runs a peer on a workload, the way the peer's own documentation shows for offline work.

    python peer_driver.py NAME WORKLOAD.jsonl SETTINGS      a JSON object: model, dtype, device, threads, longest, ...

An interpreter that has the peer executes this file, so it imports nothing of cbatch. It prints what
`cbatch.bench.contender.Contender` asks for.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]  # token_ids, max_tokens
Generate = Callable[[list[Row]], list[int]]  # rows -> number of tokens that each got

# A peer is a function of the settings that returns its `generate` and how many rows to give it at a time.
_SEQS, _BATCHED_TOKENS, _KV_GIB = 256, 4096, 4
_STATIC_BATCH = 64  # rows
_WARM_UP = [{"token_ids": list(range(8, 72)), "max_tokens": 4}] * 4


def transformers(settings: dict[str, Any]) -> tuple[Generate, int]:
    """transformers' own `generate`: static batches, padded on the left, which run until their longest row ends."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(settings["threads"])
    dtype, device = getattr(torch, settings["dtype"]), settings["device"]
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).to(device).eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)  # and no end-of-sequence token

    def generate(rows: list[Row]) -> list[int]:
        width = max(len(row["token_ids"]) for row in rows)
        ids = torch.tensor([[0] * (width - len(row["token_ids"])) + row["token_ids"] for row in rows])
        mask = torch.tensor([[int(k >= width - len(row["token_ids"])) for k in range(width)] for row in rows])
        longest = max(row["max_tokens"] for row in rows)
        out = model.generate(ids.to(device), attention_mask=mask.to(device), max_new_tokens=longest)
        return [min(out.shape[1] - width, row["max_tokens"]) for row in rows]

    return generate, _STATIC_BATCH


def vllm(settings: dict[str, Any]) -> tuple[Generate, int]:
    """vLLM's offline interface, which gets all rows at once."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if settings["device"] == "cpu":
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(_KV_GIB)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, settings["cpus"]))
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        max_num_seqs=_SEQS,
        max_num_batched_tokens=_BATCHED_TOKENS,
        max_model_len=settings["longest"],
        enable_prefix_caching=settings["prefix_caching"],
    )

    def generate(rows: list[Row]) -> list[int]:
        params = [SamplingParams(temperature=0, max_tokens=row["max_tokens"], ignore_eos=True) for row in rows]
        prompts = [{"prompt_token_ids": row["token_ids"]} for row in rows]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate, sys.maxsize


def openvino(settings: dict[str, Any]) -> tuple[Generate, int]:
    """OpenVINO's continuous batching on a CPU, which gets all rows at once."""
    import numpy as np
    from openvino import Tensor
    from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

    scheduler = SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = _KV_GIB, _SEQS
    scheduler.max_num_batched_tokens = _BATCHED_TOKENS
    scheduler.enable_prefix_caching = settings["prefix_caching"]
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": settings["threads"], "CACHE_DIR": ""}
    if hint := {"bfloat16": "bf16", "float32": "f32"}.get(settings["dtype"]):
        properties["INFERENCE_PRECISION_HINT"] = hint
    pipeline = ContinuousBatchingPipeline(settings["converted"], scheduler, "CPU", properties)

    def config(row: Row) -> Any:
        config = GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = row["max_tokens"], True, False
        return config

    def generate(rows: list[Row]) -> list[int]:
        prompts = [Tensor(np.array([row["token_ids"]], dtype=np.int64)) for row in rows]
        outputs = pipeline.generate(prompts, [config(row) for row in rows])
        return [len(output.m_generation_ids[0]) for output in outputs]

    return generate, sys.maxsize


_PEERS = {"transformers": transformers, "vllm": vllm, "openvino": openvino}
_VERSIONED = {"openvino": "openvino_genai"}  # peer -> its module, where that has another name


def main(name: str, workload: str, settings: str) -> None:
    """Run the peer `name`; its time counts from the first row on, after loading and warming up."""
    del sys.path[0]  # this folder: no library shall find its modules
    records = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to standard output, too
    with open(workload, encoding="utf-8") as file:  # noqa: PTH123
        rows = [{"row": k, **row, **row["params"]} for k, row in enumerate(map(json.loads, file))]
    generate, batch_size = _PEERS[name](json.loads(settings))
    generate(_WARM_UP)
    started_at = time.perf_counter()
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        for row, num_tokens in zip(batch, generate(batch), strict=True):
            records.write(json.dumps({"row": row["row"], "completion_tokens": num_tokens}) + "\n")
    figures = {"seconds": {"generation": time.perf_counter() - started_at}}
    version = sys.modules[_VERSIONED.get(name, name)].__version__
    print(json.dumps(figures | {"version": version}), file=sys.stderr, flush=True)
    records.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
