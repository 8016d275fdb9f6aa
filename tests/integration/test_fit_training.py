"""A fitted model inside ordinary training loops: everything a plain nn.Module can do there, it does the same."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from benchmarks.models.torchvision_ops import declare_missing_ops
from tests.training import NO_LIMIT, batch, deep, fit_tight, peak_bytes, recomputes, same, train, twin
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import memfit
from memfit.core.errors import BadInput


def keep_all(model: nn.Module, inputs: Any, **options: Any) -> Any:
    return memfit.fit(model, inputs, budget=NO_LIMIT, planner="keep_all", **options)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradient_accumulation(set_to_none: bool) -> None:
    plain = deep()
    model = twin(plain)
    batches = [batch(seed=k) for k in range(4)]
    fitted = fit_tight(model, (batches[0][0],), fraction=0.8)

    def accumulate(module: Any) -> list[Any]:
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        seen = []
        for k, (x, y) in enumerate(batches):
            (functional.cross_entropy(module(x), y) / 2).backward()
            if k % 2:
                seen.append([p.grad.clone() for p in module.parameters()])
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
        return seen

    assert same(accumulate(fitted), accumulate(plain))


def test_gradients_present_from_before_are_in_the_budget() -> None:
    """The second micro-step holds the gradients of the first throughout, and its plan says so."""
    model = deep()
    x, y = batch()
    fitted = fit_tight(model, (x,), fraction=0.9)
    functional.cross_entropy(fitted(x), y).backward()
    first = fitted.report().predicted_peak_bytes
    functional.cross_entropy(fitted(x), y).backward()
    report = fitted.report()
    assert report.num_shapes == 2
    assert report.measured_peak_bytes <= report.budget_bytes
    assert first <= report.budget_bytes


def test_grad_scaler() -> None:
    plain = deep(dropout=0.0)
    model = twin(plain)
    x, y = batch()
    fitted = fit_tight(model, (x,), fraction=0.8)
    for module in (plain, fitted):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for k in range(3):
            scaler.scale(functional.cross_entropy(module(x), y) * (float("inf") if k == 1 else 1)).backward()
            scaler.step(optimizer)  # the second step overflows and must be skipped
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 512.0
    assert same(dict(plain.state_dict()), dict(fitted.state_dict()))


def test_a_smaller_last_batch_gets_a_plan_of_its_own() -> None:
    plain = deep()
    model = twin(plain)
    x, y = batch(rows=40)
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    fitted = fit_tight(model, (x[:16],), fraction=0.9)
    ours, theirs = train(fitted, list(loader) * 2), train(plain, list(loader) * 2)
    assert same(ours, theirs)
    assert fitted.report().num_shapes == 2


def test_a_checkpoint_is_saved_and_resumed_in_the_middle() -> None:
    x, y = batch()
    whole = train(fit_tight(deep(dropout=0.0), (x,)), [(x, y)] * 4)
    first = deep(dropout=0.0)
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2)
    train(fit_tight(first, (x,)), [(x, y)] * 2, optimizer=optimizer)
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    second = deep(dropout=0.0)
    fitted = fit_tight(second, (x,))
    fitted.load_state_dict(saved[0])
    resumed = torch.optim.AdamW(fitted.parameters(), lr=1e-2)
    resumed.load_state_dict(saved[1])
    assert same(train(fitted, [(x, y)] * 2, optimizer=resumed)["state"], whole["state"])


def test_a_state_dict_fits_the_plain_model_and_back() -> None:
    x, _ = batch()
    model = deep()
    fitted = keep_all(model, (x,))
    assert list(fitted.state_dict()) == list(deep().state_dict())
    deep().load_state_dict(fitted.state_dict())
    assert list(map(id, fitted.parameters())) == list(map(id, model.parameters()))
    assert isinstance(fitted, nn.Sequential)


def test_switching_between_train_and_eval() -> None:
    plain = deep()
    model = twin(plain)
    x, y = batch()
    fitted = fit_tight(model, (x,), fraction=0.9)
    for module in (plain, fitted):
        train(module, [(x, y)])
        module.eval()
        assert not module[0].training
        module.seen = [functional.cross_entropy(module(x), y)]
        module.seen[0].backward()
        module.train()
        train(module, [(x, y)])
    assert same(plain.seen[0], fitted.seen[0])
    assert same(dict(plain.state_dict()), dict(fitted.state_dict()))


def test_inference_without_gradients_holds_no_activations() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    peaks = []
    for depth in (4, 16):
        fitted = keep_all(nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(32, 32), nn.Tanh())]), (x,))
        with torch.no_grad():
            fitted(x)
            peaks.append(peak_bytes(lambda f=fitted: f(x), 0))
    assert peaks[0] == peaks[1] <= 3 * x.nbytes


def test_inference_mode_and_no_grad_give_the_plain_output() -> None:
    x, _ = batch()
    model = deep().eval()
    expected = model(x)
    fitted = keep_all(model, (x,))
    with torch.no_grad():
        assert torch.equal(fitted(x), expected)
    with torch.inference_mode():
        assert torch.equal(fitted(x), expected)


def test_hooks_on_the_module() -> None:
    x, y = batch()
    fitted = keep_all(deep(), (x,))
    seen: list[str] = []
    fitted.register_forward_pre_hook(lambda m, args: seen.append("before"))
    fitted.register_forward_hook(lambda m, args, output: seen.append("after"))
    functional.cross_entropy(fitted(x), y).backward()
    assert seen == ["before", "after"]


def test_hooks_on_parameters() -> None:
    plain = deep(dropout=0.0)
    model = twin(plain)
    x, y = batch()
    fitted = fit_tight(model, (x,), fraction=0.9)
    for module in (plain, fitted):
        module.seen = []
        first, last = module[0][0].weight, module[-1].bias
        first.register_hook(lambda g: g * 2)
        last.register_hook(lambda g, m=module: m.seen.append(("hook", g.clone())))
        last.register_post_accumulate_grad_hook(lambda p, m=module: m.seen.append(("after", p.grad.clone())))
        functional.cross_entropy(module(x), y).backward()
    assert same(plain.seen, fitted.seen)
    assert [name for name, _ in fitted.seen] == ["hook", "after"]
    assert same([p.grad for p in plain.parameters()], [p.grad for p in fitted.parameters()])


def test_an_optimizer_step_inside_backward() -> None:
    """Post-accumulate hooks that step and free each gradient at once: parameters change while backward still runs."""
    plain = deep(dropout=0.0)
    model = twin(plain)
    x, y = batch()
    fitted = keep_all(model, (x,), check=False)

    def descend(p: torch.Tensor) -> None:
        p.data.add_(p.grad, alpha=-0.1)
        p.grad = None

    for module in (plain, fitted):
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(descend)
        for _ in range(2):
            functional.cross_entropy(module(x), y).backward()
    assert all(p.grad is None for p in fitted.parameters())
    assert same(dict(plain.state_dict()), dict(fitted.state_dict()))


def test_autograd_grad_leaves_grad_alone() -> None:
    plain = deep(dropout=0.0)
    model = twin(plain)
    x, y = batch()
    fitted = fit_tight(model, (x,), fraction=0.9)
    ours = torch.autograd.grad(functional.cross_entropy(fitted(x), y), list(fitted.parameters()))
    theirs = torch.autograd.grad(functional.cross_entropy(plain(x), y), list(plain.parameters()))
    assert same(ours, theirs)
    assert all(p.grad is None for p in fitted.parameters())


def test_autograd_grad_of_some_parameters() -> None:
    plain = deep(dropout=0.0)
    model = twin(plain)
    x, y = batch()
    fitted = keep_all(model, (x,))
    ours = torch.autograd.grad(functional.cross_entropy(fitted(x), y), [fitted[-1].weight])
    theirs = torch.autograd.grad(functional.cross_entropy(plain(x), y), [plain[-1].weight])
    assert same(ours, theirs)
    assert all(p.grad is None for p in fitted.parameters())


def test_gradients_of_inputs() -> None:
    plain = deep(dropout=0.0)
    model = twin(plain)
    x, y = batch()
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    fitted = fit_tight(model, (ours,), fraction=0.9)
    functional.cross_entropy(fitted(ours), y).backward()
    functional.cross_entropy(plain(theirs), y).backward()
    assert same(ours.grad, theirs.grad)


def test_an_input_computed_by_another_model() -> None:
    torch.manual_seed(0)
    front, plain = nn.Linear(16, 16), deep(dropout=0.0)
    model = twin(plain)
    x, y = batch()
    fitted = keep_all(model, (front(x),))
    functional.cross_entropy(fitted(front(x)), y).backward()
    ours = front.weight.grad.clone()
    front.zero_grad()
    functional.cross_entropy(plain(front(x)), y).backward()
    assert same(ours, front.weight.grad)


def test_frozen_parameters_get_no_gradient() -> None:
    plain = deep()
    for p in plain[0].parameters():
        p.requires_grad_(False)
    model = twin(plain)
    x, y = batch()
    fitted = fit_tight(model, (x,), fraction=0.9)
    for module in (plain, fitted):
        torch.manual_seed(0)
        functional.cross_entropy(module(x), y).backward()
    assert fitted[0][0].weight.grad is None
    assert same([p.grad for p in plain.parameters()], [p.grad for p in fitted.parameters()])


def test_freezing_later_plans_again() -> None:
    x, y = batch()
    fitted = keep_all(deep(), (x,))
    functional.cross_entropy(fitted(x), y).backward()
    fitted.zero_grad()
    fitted[0].requires_grad_(False)
    functional.cross_entropy(fitted(x), y).backward()
    assert fitted[0][0].weight.grad is None
    assert fitted[1][0].weight.grad is not None


class Several(nn.Module):
    """Keyword and nested inputs, and outputs of several kinds, one of them an input handed through."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, *, more: dict[str, Any], scale: float = 1.0) -> dict[str, Any]:
        hidden = torch.relu(self.a(x)) * scale
        flags = more["flags"]
        logits = self.b(hidden + more["list"][0]) * flags[:, None]
        return {"logits": logits, "hidden": (hidden, hidden.view(-1)), "same": x, "count": flags.sum(), "text": "hi", "none": None}


def test_nested_inputs_and_several_outputs() -> None:
    plain = Several()
    model = twin(plain)
    x = torch.randn(5, 8)
    more = {"list": [torch.randn(5, 8)], "flags": torch.tensor([True, False, True, True, False])}
    fitted = keep_all(model, memfit.Inputs(x, more=more, scale=0.5))
    outcomes = []
    for module in (plain, fitted):
        output = module(x, more=more, scale=0.5)
        (output["logits"].sum() + output["hidden"][1].square().sum()).backward()
        outcomes.append((output, [p.grad for p in module.parameters()]))
    assert same(*outcomes)
    assert outcomes[1][0]["text"] == "hi"
    assert not outcomes[1][0]["count"].requires_grad


def test_an_output_that_backward_does_not_use() -> None:
    plain = Several()
    model = twin(plain)
    x, more = torch.randn(5, 8), {"list": [torch.randn(5, 8)], "flags": torch.ones(5, dtype=torch.bool)}
    fitted = keep_all(model, memfit.Inputs(x, more=more))
    for module in (plain, fitted):
        module(x, more=more)["hidden"][0].sum().backward()
    assert same([p.grad for p in plain.a.parameters()], [p.grad for p in fitted.a.parameters()])


def test_a_model_with_keyword_inputs_only() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, *, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[index].sum()

    torch.manual_seed(0)
    plain = Keywords()
    fitted = keep_all(twin(plain), {"x": torch.randn(3, 4), "index": torch.tensor([0, 2])})
    inputs = {"x": torch.randn(3, 4), "index": torch.tensor([1, 1])}
    for module in (plain, fitted):
        module(**inputs).backward()
    assert same([p.grad for p in plain.parameters()], [p.grad for p in fitted.parameters()])


def test_a_huggingface_model_with_its_own_output_class() -> None:
    transformers = pytest.importorskip("transformers")
    declare_missing_ops()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, max_position_embeddings=8
    )
    plain = transformers.BertForMaskedLM(config).train()
    model = twin(plain)
    tokens = torch.randint(0, 20, (2, 6))
    inputs = {"input_ids": tokens, "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2]), "labels": tokens}
    fitted = keep_all(model, inputs)
    outcomes = []
    for module in (plain, fitted):
        torch.manual_seed(1)
        output = module(**inputs)
        output.loss.backward()
        outcomes.append((output.loss.detach(), output.logits.detach(), [p.grad for p in module.parameters()]))
        assert type(output).__name__ == "MaskedLMOutput"
    assert same(*outcomes)
    assert fitted.config is model.config


def test_a_user_who_runs_the_profiler() -> None:
    x, y = batch()
    plain = deep()
    fitted = fit_tight(twin(plain), (x,), fraction=0.9)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        ours = train(fitted, [(x, y)] * 2)
    assert len(seen.events()) > 10
    assert same(ours, train(plain, [(x, y)] * 2))


def test_two_fitted_models_in_two_threads() -> None:
    x, y = batch()
    plain = deep(dropout=0.0)
    expected = train(twin(plain), [(x, y)] * 5)["state"]
    models = [fit_tight(twin(plain), (x,), fraction=0.9) for _ in range(2)]
    states: dict[int, Any] = {}

    def work(k: int) -> None:
        optimizer = torch.optim.AdamW(models[k].parameters(), lr=1e-2)
        for _ in range(5):
            functional.cross_entropy(models[k](x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        states[k] = dict(models[k].state_dict())

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same(states[0], dict(expected))
    assert same(states[1], dict(expected))


def test_two_forwards_before_two_backwards() -> None:
    plain = deep()
    model = twin(plain)
    (x1, y1), (x2, y2) = batch(seed=1), batch(seed=2)
    fitted = fit_tight(model, (x1,), fraction=0.9)
    assert recomputes(fitted) or fitted.plan is not None
    for module in (plain, fitted):
        torch.manual_seed(0)
        first, second = module(x1), module(x2)
        functional.cross_entropy(second, y2).backward()
        functional.cross_entropy(first, y1).backward()
    assert same([p.grad for p in plain.parameters()], [p.grad for p in fitted.parameters()])


def test_a_copy_is_a_plain_model() -> None:
    x, _ = batch()
    fitted = keep_all(deep(), (x,))
    average = copy.deepcopy(fitted)
    assert type(average) is nn.Sequential
    assert torch.equal(average.eval()(x), fitted.eval()(x))


def test_without_gradients_a_model_with_its_loss_gives_predictions() -> None:
    x, y = batch()
    plain = deep()
    fitted: Any = memfit.fit(twin(plain), (x,), budget=NO_LIMIT, loss_fn=functional.cross_entropy, example_targets=(y,))
    fitted.eval()
    plain.eval()
    with torch.no_grad():
        assert torch.equal(fitted(x), plain(x))
        assert torch.equal(fitted(x, y), functional.cross_entropy(plain(x), y))
    with pytest.raises(BadInput, match=r"for predictions leave them out under torch.no_grad\(\)"):
        fitted(x)
    fitted.train()(x, y).backward()
