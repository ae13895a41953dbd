"""Fused modules take the place of a model's own only where they compute the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers

from cbatch.model.attention import attention_specs
from cbatch.model.batch import single
from cbatch.model.fused import is_quantized
from cbatch.model.kv_cache import KVCache
from cbatch.model.ops import Backend, choose
from cbatch.model.substitute import substitute
from cbatch.rows.request import Request
from tests.drive import make_engine, make_request, run
from tests.interpreter import INTERPRETER
from tests.tiny import VOCAB_SIZE, generate, make_config, make_model

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "llama": ("LlamaConfig", {}, {"RMSNorm": 5, "Attention": 2, "MLP": 2, "DecoderLayer": 2}),
    "qwen2": ("Qwen2Config", {}, {"RMSNorm": 5, "Attention": 2, "MLP": 2, "DecoderLayer": 2}),
    "qwen3": ("Qwen3Config", {}, {"RMSNorm": 5, "Attention": 2, "MLP": 2, "DecoderLayer": 2}),
    "gemma2": ("Gemma2Config", {"sliding_window": 8}, {"RMSNorm": 9, "Attention": 2, "MLP": 2}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8}, {"RMSNorm": 9, "Attention": 2, "MLP": 2}),
    "phi3": ("Phi3Config", {}, {"RMSNorm": 5, "MLP": 2}),
    "mixtral": (
        "MixtralConfig",
        {"num_local_experts": 4},
        {"RMSNorm": 5, "Attention": 2, "Experts": 2, "DecoderLayer": 2},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2},
        {"RMSNorm": 5, "Attention": 2, "Experts": 2, "DecoderLayer": 2},
    ),
    # Every fourth layer does not rotate, and the norm of OLMo 2 spans all heads: these keep their own attention.
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4}, {"RMSNorm": 9, "Attention": 3, "MLP": 4, "DecoderLayer": 3}),
    "olmo2": ("Olmo2Config", {}, {"RMSNorm": 9, "MLP": 2}),
}


BLOCK_SIZE = {"torch": 4, "c": 32, "triton": 4}  # the C kernels take blocks of 32 and heads of 16


BACKEND = {"torch": lambda: Backend(), "c": lambda: choose(torch.device("cpu")), "triton": lambda: INTERPRETER}


def config_of(family: str, head_dim: int = 8) -> Any:
    kind, settings, _ = FAMILIES[family]
    return make_config(getattr(transformers, kind), head_dim=head_dim, **settings)


@pytest.mark.parametrize("kernels", BACKEND)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_model_generates_what_transformers_does(family: str, kernels: str) -> None:
    config, block_size = config_of(family, 16 if kernels == "c" else 8), BLOCK_SIZE[kernels]
    backend = BACKEND[kernels]()
    model, own = make_model(config, "cbatch"), make_model(config, "eager")
    expected = dict(FAMILIES[family][2])
    if kernels != "triton":
        expected.pop("Experts", None)  # there, the model's own are faster
    assert substitute(model, attention_specs(model), block_size, backend=backend) == expected
    generator = torch.Generator().manual_seed(1)
    lengths = [9] if kernels == "triton" else [1, 7, 30]
    requests = [
        make_request(n, torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist(), max_tokens=6)
        for n, length in enumerate(lengths)
    ]
    engine = make_engine(model, block_size=block_size, budget=16, max_num_seqs=3, backend=backend)
    for request, done in zip(requests, run(engine, requests), strict=True):
        assert list(done.token_ids) == generate(own, request.token_ids, 6)


def test_a_module_with_a_twist_keeps_its_own_arithmetic() -> None:
    model = make_model(make_config(), "cbatch")
    norm, mlp = model.model.layers[0].input_layernorm, model.model.layers[1].mlp
    forward_norm, forward_mlp = norm.forward, mlp.forward
    norm.forward = lambda x: forward_norm(x) * 1.01
    mlp.forward = lambda x: forward_mlp(x) + 0.5
    assert substitute(model, attention_specs(model), 4) == {
        "RMSNorm": 4,
        "Attention": 2,
        "MLP": 1,
        "DecoderLayer": 2,
    }
    assert model.model.layers[0].input_layernorm is norm
    assert model.model.layers[1].mlp is mlp


def test_merged_weights_are_not_kept_twice() -> None:
    model = make_model(make_config(), "cbatch")
    before = sum(weight.numel() for weight in model.parameters())
    substitute(model, attention_specs(model), 4)
    assert sum(weight.numel() for weight in model.parameters()) == before


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize(("dtype", "int8"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True)])
@pytest.mark.parametrize("kind", ["LlamaConfig", "Qwen2Config", "Qwen3Config", "MistralConfig"])
def test_a_layer_in_one_call_computes_what_its_parts_do(
    kind: str, dtype: torch.dtype, int8: bool, cache_dtype: torch.dtype | None
) -> None:
    config = make_config(getattr(transformers, kind), head_dim=16, sliding_window=30, intermediate_size=80)
    model = make_model(config, "cbatch").to(dtype)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:  # norms and biases, which are ones and zeros
            weight.data.normal_(1 if "norm" in name else 0, 0.3)
    specs = attention_specs(model)
    substitute(model, specs, 32, int8)
    settings = {0: specs[0]}, 3, 32, cache_dtype or dtype, model.device
    layer, caches = model.model.layers[0], [KVCache(*settings) for _ in range(2)]
    if layer.compiled is None and not int8:
        pytest.skip("torch's own product, which this CPU does in float32")
    both = layer.compiled, None
    assert both[0] is not None
    for first, stop in ((0, 37), (37, 38), (38, 75)):
        batch, outs = single(first, stop, 3, 32, model.device), []
        x = torch.randn(1, stop - first, 2 * config.hidden_size).to(dtype)[..., : config.hidden_size]
        angles = model.model.rotary_emb(x, batch.positions[None])
        for layer.compiled, cache in zip(both, caches, strict=True):
            outs.append(layer(x, position_embeddings=angles, batch=batch, kv_cache=cache))
        assert torch.equal(*outs)
    assert torch.equal(caches[0].k[0], caches[1].k[0])
    assert torch.equal(caches[0].v[0], caches[1].v[0])


def shared_beginnings() -> list[Request]:
    """Prompts that share up to three blocks of 32 tokens, too many for the caches below."""
    rng = random.Random(5)
    beginning = [rng.randrange(3, VOCAB_SIZE) for _ in range(100)]
    prompts = [beginning[:length] + [rng.randrange(3, VOCAB_SIZE) for _ in range(7)] for length in (100, 64, 90, 33, 3)]
    return [make_request(n, prompt, max_tokens=50) for n, prompt in enumerate(prompts * 2)]


def test_preempted_and_shared_blocks_of_the_c_kernels_hold_what_transformers_computes() -> None:
    model, own = (make_model(make_config(head_dim=16), kind) for kind in ("cbatch", "eager"))
    substitute(model, attention_specs(model), 32)
    engine, requests = make_engine(model, num_blocks=13, block_size=32, budget=45), shared_beginnings()
    for request, done in zip(requests, run(engine, requests), strict=True):
        assert list(done.token_ids) == generate(own, request.token_ids, 50)
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_cached_tokens > 0


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize(("dtype", "int8"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True)])
def test_rounding_in_the_c_kernels_does_not_depend_on_the_batch(
    dtype: torch.dtype, int8: bool, cache_dtype: torch.dtype | None
) -> None:
    """Preempted, on prefixes that were computed for others, in slices and alone a row is what it is in ample memory."""
    model = make_model(make_config(head_dim=16), "cbatch").to(dtype)
    specs = attention_specs(model)
    counts = substitute(model, specs, 32, int8)
    assert counts.items() >= {"RMSNorm": 5, "Attention": 2, "MLP": 2, "DecoderLayer": 2}.items()
    assert is_quantized(model) == int8
    if dtype == torch.bfloat16 and "Linear" not in counts:
        pytest.skip("torch's own product, which this CPU does in float32")
    requests, outcomes = shared_beginnings(), []
    for num_blocks, budget, most in ((99, 999, 10), (13, 45, 10), (99, 7, 1)):
        engine = make_engine(model, num_blocks, 32, budget, most, specs=specs, cache_dtype=cache_dtype)
        outcomes.append([done.token_ids for done in run(engine, requests)])
        assert (engine.stats.num_preemptions > 0) == (num_blocks == 13)
        assert (engine.stats.num_cached_tokens > 0) == (budget < 999)
    assert outcomes[1:] == outcomes[:1] * 2
