"""transformers models with their loss inside on a CUDA device: sums that a compiler hands back flat, logits that a budget does not hold."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

import memfit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROWS, LENGTH, WORDS = 16, 512, 16_000


def llama() -> Any:
    """8,192 rows of 768: large enough for Inductor's mix-order reductions, which 2.11 hands back without their dimensions of one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=12, num_key_value_heads=4, vocab_size=WORDS
    )
    return LlamaForCausalLM(config).cuda().bfloat16()


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=768, d_ff=1024, d_kv=64, num_layers=1, num_heads=12, vocab_size=WORDS, decoder_start_token_id=0, dropout_rate=0.0
    )
    return T5ForConditionalGeneration(config).cuda()


@pytest.mark.parametrize(("make", "fraction", "tolerance"), [(llama, 0.4, 3e-2), (t5, 0.6, 3e-3)])
def test_less_memory_is_enough_and_gradients_are_right(make: Any, fraction: float, tolerance: float) -> None:
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    tokens = torch.randint(1, WORDS, (ROWS, LENGTH), device="cuda")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    plain(input_ids=tokens, labels=tokens).loss.backward()
    others = sum(p.nbytes for p in plain.parameters()) * 2  # the plain model and its gradients stay, beside ours
    peak = torch.cuda.max_memory_allocated() - sum(p.nbytes for p in model.parameters())
    fitted = memfit.fit(
        model, {"input_ids": tokens, "labels": tokens}, budget=others + int(fraction * peak), engine="inductor", time_limit_s=5, check=False
    )
    for _ in range(2):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        output = fitted(input_ids=tokens, labels=tokens)
        output.loss.backward()
    measured = torch.cuda.max_memory_allocated()
    worst = max(
        float((a.grad - b.grad).float().norm() / b.grad.float().norm())
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
        if b.grad is not None and a.grad is not None
    )
    print(
        f"{make.__name__}: {measured / 2**20:.0f} MiB of {(others + fraction * peak) / 2**20:.0f}, plain {peak / 2**20:.0f}, worst {worst:.1e}"
    )
    assert measured <= others + int(fraction * peak)
    assert worst < tolerance
    assert output.logits[0, 0, 0].isfinite()
