"""The fitted model in the hands of tools: hooks, patched forwards, copies, names in files."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.models.torchvision_ops import declare_missing_ops
from tests.training import batch, deep, fit_tight, recomputes, same, train, twin
from torch import nn
from torch.nn import functional

import memfit


def _patched(model: nn.Module, factor: float = 3.0) -> nn.Module:
    """A forward on the instance that computes something else, as a monkeypatch does."""
    plain = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return factor * plain(self, *args, **kwargs)

    model.forward = types.MethodType(forward, model)
    return model


def _as_accelerate(model: nn.Module) -> nn.Module:
    """What `Accelerator(mixed_precision="bf16").prepare` does to a model."""
    model._original_forward = model.forward
    wrapped = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward.__func__)
    model.forward = types.MethodType(wrapped, model)
    plain = model.forward.__func__

    @functools.wraps(plain)
    def in_single_precision(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs).float()

    model.forward = types.MethodType(in_single_precision, model)
    return model


@pytest.mark.parametrize("patch", [_patched, _as_accelerate])
def test_a_forward_on_the_instance_is_what_is_planned(patch: Any) -> None:
    plain = deep(dropout=0.0)
    x, y = batch()
    fitted = fit_tight(patch(twin(plain)), (x,))
    assert recomputes(fitted)
    assert same(train(fitted, [(x, y)] * 3), train(patch(plain), [(x, y)] * 3))
    assert fitted.report().measured_peak_bytes <= fitted.report().budget_bytes


@pytest.mark.parametrize("patch", [_patched, _as_accelerate])
def test_a_forward_put_on_the_fitted_model_is_what_is_planned(patch: Any) -> None:
    """Tools that prepare a model get the fitted one as well; what they put on it leads back to its own forward."""
    plain = deep(dropout=0.0)
    x, y = batch()
    fitted: Any = memfit.fit(twin(plain), (x[:7],), budget="1GiB")
    patch(fitted)
    assert same(train(fitted, [(x, y)] * 3), train(patch(plain), [(x, y)] * 3))
    assert fitted.report().measured_peak_bytes is not None


def test_accelerate_prepares_model_and_optimizer() -> None:
    from accelerate import Accelerator

    def losses(fit: bool) -> list[float]:
        model, (x, y) = deep(dropout=0.0), batch()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        run, stepped = accelerator.prepare(model, optimizer)
        if fit:
            run = memfit.fit(run, (x,), budget="1GiB", optimizer=stepped)
        seen = []
        for _ in range(4):
            loss = functional.cross_entropy(run(x), y)
            accelerator.backward(loss)
            stepped.step()
            stepped.zero_grad()
            seen.append(loss.item())
        assert not fit or run.report().measured_peak_bytes is not None
        return seen

    assert losses(True) == losses(False)


def test_hooks_on_the_root_run_once_and_see_the_models_output() -> None:
    def hooked(model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        model.register_forward_hook(lambda module, args, output: output + 1)
        return model

    plain = hooked(deep())
    x, y = batch()
    ours = hooked(deep())
    fitted: Any = memfit.fit(ours, (x,), budget="1GiB", loss_fn=functional.cross_entropy, example_targets=(y,))
    torch.manual_seed(0)
    loss = fitted(x, y)
    loss.backward()
    torch.manual_seed(0)
    expected = functional.cross_entropy(plain(x), y)
    expected.backward()
    assert torch.equal(loss, expected)
    assert same([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])
    with torch.no_grad():
        assert torch.equal(fitted.eval()(x, y), functional.cross_entropy(plain.eval()(x), y))


def test_copies_are_plain_models_and_pickles_are_refused() -> None:
    model, (x, _) = deep(), batch()
    fitted = memfit.fit(model, (x,), budget="1GiB")
    shallow, whole = copy.copy(fitted), copy.deepcopy(fitted)
    assert type(shallow) is type(whole) is nn.Sequential
    assert all(a is b for a, b in zip(shallow.parameters(), model.parameters(), strict=True))
    assert all(a is not b for a, b in zip(whole.parameters(), model.parameters(), strict=True))
    with torch.no_grad():
        assert torch.equal(shallow.eval()(x), whole.eval()(x))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="state_dict"):
            pickle.dumps(fitted, protocol)


def test_a_class_that_pickles_its_own_way_is_refused_too() -> None:
    class Own(nn.Linear):
        def __reduce_ex__(self, protocol: Any) -> Any:
            return (nn.Linear, (2, 2))

    fitted = memfit.fit(Own(2, 2), (torch.randn(1, 2),), budget="1GiB")
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(fitted)


def test_a_fitted_model_goes_by_its_own_name() -> None:
    fitted = memfit.fit(deep(), (batch()[0],), budget="1GiB")
    assert type(fitted).__name__ == fitted._get_name() == "Sequential"
    assert type(fitted) is not nn.Sequential


def test_a_saved_checkpoint_names_a_class_that_exists(tmp_path: Path) -> None:
    declare_missing_ops()
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8)
    model = GPT2LMHeadModel(config)
    tokens = torch.randint(0, 11, (2, 8))
    fitted: Any = memfit.fit(model, {"input_ids": tokens, "labels": tokens}, budget="1GiB", planner="keep_all")
    fitted.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    again = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert same({k: v.detach() for k, v in again.state_dict().items()}, {k: v.detach() for k, v in model.state_dict().items()})
