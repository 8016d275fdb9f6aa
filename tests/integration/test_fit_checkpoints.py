"""Models that have `torch.utils.checkpoint` in them already: left out, so that nothing is computed again twice; said, and exact."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from benchmarks.models.torchvision_ops import declare_missing_ops
from tests.training import same_steps
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import memfit

WORDS = 40
NOTE = "torch.utils.checkpoint is left out at {} of the model"


class Blocks(nn.Module):
    """Dropout inside the checkpointed blocks. `how`: None for the model without any; `breaks`: Dynamo has no graph of it."""

    def __init__(self, how: str | None, *, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.breaks = how, breaks
        self.embed, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 16)) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        x = self.embed(tokens)
        if self.how == "sequential":
            return self.head(checkpoint_sequential(nn.Sequential(*self.blocks), 3, x, use_reentrant=False))
        for block in self.blocks:
            x = x + self._run(block, x)
        return self.head(x)

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.how is None:
            return block(x)
        if self.how == "selective":
            contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
            return checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return checkpoint(block, x, use_reentrant=self.how == "reentrant")


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens() -> Tensor:
    return torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(1))


def fit(model: nn.Module, **options: Any) -> Any:
    return memfit.fit(model, (tokens(),), loss_fn=loss_fn, example_targets=(tokens(),), budget="1GiB", **options)


def train_both(plain: nn.Module, fitted: Any) -> None:
    """Two steps with dropout: the same loss and gradients to the last bit, and None where the plain model has None."""
    same_steps(plain, fitted, lambda: loss_fn(plain(tokens()), tokens()), lambda: fitted(tokens(), tokens()))


def graph_of(fitted: Any) -> Any:
    return fitted._memfit.latest.ready.captured.graph


@pytest.mark.parametrize("breaks", [False, True], ids=["captured", "own trace"])
@pytest.mark.parametrize("how", ["without reentry", "reentrant", "selective"])
def test_checkpoints_are_left_out(how: str, breaks: bool) -> None:
    without, model = fit(Blocks(None, breaks=breaks), check=False), Blocks(how, breaks=breaks)
    fitted = fit(copy.deepcopy(model), check=True)
    assert len(graph_of(fitted).ops) == len(graph_of(without).ops)  # nothing is computed again, and nothing kept for it
    assert graph_of(fitted).digest == graph_of(without).digest
    train_both(model, fitted)
    report = fitted.report()
    assert "bit for bit" in report.check
    assert any(NOTE.format("3 places") in note for note in report.notes)
    assert without.report().notes == ()


def test_a_sequential_one() -> None:
    model = Blocks("sequential")
    fitted = fit(copy.deepcopy(model))
    train_both(model, fitted)
    assert any(NOTE.format("2 places") in note for note in fitted.report().notes)  # torch runs the last segment as it is


@pytest.mark.parametrize("breaks", [False, True], ids=["captured", "own trace"])
def test_a_reentrant_one_after_a_frozen_embedding_gives_no_gradients(breaks: bool) -> None:
    """As in plain PyTorch, which warns: what is handed to it wants no gradient, so that it has nothing to go back for."""
    model = Blocks("reentrant", breaks=breaks)
    model.embed.requires_grad_(False)
    fitted = fit(copy.deepcopy(model), check=True)
    with pytest.warns(UserWarning, match="requires_grad=True"):
        train_both(model, fitted)
    assert all(p.grad is None for p in fitted.blocks.parameters())
    assert fitted.head.weight.grad is not None
    assert "bit for bit" in fitted.report().check


def test_ops_inside_a_checkpoint_come_from_their_own_module() -> None:
    wheres = {op.where.split(",")[0] for op in graph_of(fit(Blocks("without reentry"), check=False)).ops}
    assert {"blocks.0.0", "blocks.2.3"} <= wheres


def test_an_estimate_does_not_depend_on_them() -> None:
    plain, kept = (memfit.estimate(Blocks(how), (tokens(),), time_limit_s=0.1) for how in ("reentrant", None))
    assert plain.peak_bytes == kept.peak_bytes
    assert plain.num_ops == kept.num_ops


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_of_transformers(reentrant: bool) -> None:
    pytest.importorskip("transformers")
    declare_missing_ops()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=16, bos_token_id=1, eos_token_id=2, **sizes)).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    batch = {"input_ids": tokens(), "labels": tokens()}
    fitted = memfit.fit(copy.deepcopy(model), batch, budget="1GiB", check=True)
    model(**batch).loss.backward()
    fitted(**batch).loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), fitted.parameters(), strict=True))
    assert any(NOTE.format("2 places") in note for note in fitted.report().notes)
    assert "bit for bit" in fitted.report().check


@pytest.mark.parametrize("how", ["without reentry", "reentrant"])
def test_the_backend_of_torch_compile(how: str) -> None:
    """Dropout included, and compared in the first step: what Dynamo writes for a checkpoint draws other numbers when it is run again."""
    memfit.register_backend()
    torch._dynamo.reset()
    model = Blocks(how)
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="memfit", options={"budget": "1GiB", "check": True})
    for seed in range(2):
        for each, step in ((model, compiled), (plain, plain)):
            each.zero_grad()
            torch.manual_seed(seed)
            loss_fn(step(tokens()), tokens()).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
