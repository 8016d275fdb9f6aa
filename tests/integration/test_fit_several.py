"""Frozen parts, adapters, quantised weights, and several models in one budget: exact, and inside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.models.torchvision_ops import declare_missing_ops
from tests.storage_meter import AllocationMeter
from tests.training import fit_tight, held_bytes, recomputes, same_steps
from torch import Tensor, nn
from torch.nn import functional

import memfit

WORDS = 60


class Language(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        blocks = (nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * width, width)) for _ in range(depth))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens() -> Tensor:
    return torch.randint(0, WORDS, (8, 16), generator=torch.Generator().manual_seed(1))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def fit(model: nn.Module, budget: int | str = "1GiB", **options: Any) -> Any:
    options = {"optimizer": torch.optim.AdamW(trained(model)), "time_limit_s": 2, "check": True, **options}
    return memfit.fit(model, (tokens(),), loss_fn=loss_fn, example_targets=(tokens(),), budget=budget, **options)


def train_both(plain: nn.Module, fitted: Any, num_steps: int = 2) -> None:
    """Loss and gradients to the last bit, None where the plain model has None."""
    same_steps(plain, fitted, lambda: loss_fn(plain(tokens()), tokens()), lambda: fitted(tokens(), tokens()), num_steps)


def test_an_embedding_that_is_frozen_and_later_trained() -> None:
    plain = Language()
    plain.embed.requires_grad_(False)
    fitted = fit(copy.deepcopy(plain))
    train_both(plain, fitted)
    assert fitted.embed.weight.grad is None
    for model in (plain, fitted):
        model.embed.requires_grad_(True)
    train_both(plain, fitted)
    assert fitted.report().num_shapes == 2
    for model in (plain, fitted):  # and frozen again, its gradient left where it is
        model.embed.requires_grad_(False)
    train_both(plain, fitted)


def test_gradients_left_on_frozen_parameters_are_counted_and_said() -> None:
    model = Language()
    fitted = fit(model, optimizer=None)
    fitted(tokens(), tokens()).backward()
    whole = fitted.report().predicted_peak_bytes
    for p in model.blocks.parameters():
        p.requires_grad_(False)
    left = sum(p.nbytes for p in model.blocks.parameters())
    for p in trained(model):
        p.grad = None
    fitted(tokens(), tokens()).backward()
    report = fitted.report()
    assert any("frozen parameters hold gradients" in note for note in report.notes)
    assert report.predicted_peak_bytes >= report.measured_peak_bytes
    with_left = report.predicted_peak_bytes
    model.zero_grad()
    for p in model.blocks.parameters():
        p.grad = None
    fitted(tokens(), tokens()).backward()
    assert with_left - fitted.report().predicted_peak_bytes == left
    assert fitted.report().predicted_peak_bytes < whole


class Adapter(nn.Module):
    """Low-rank, beside a layer that is frozen."""

    def __init__(self, base: nn.Module, inside: int, outside: int, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Parameter(0.1 * torch.randn(rank, inside)), nn.Parameter(0.1 * torch.randn(outside, rank))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.drop(x) @ self.a.T @ self.b.T


class Product(torch.autograd.Function):
    """With weights of eight bits, which get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return x @ (weight.to(x.dtype) * scale[:, None]).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        weight, scale = ctx.saved_tensors
        return gradient @ (weight.to(gradient.dtype) * scale[:, None]), None, None


@torch.library.custom_op("memfit_tests::product8", mutates_args=())
def product8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x @ (weight.to(x.dtype) * scale[:, None]).T


@torch.library.custom_op("memfit_tests::product8_backward", mutates_args=())
def product8_backward(gradient: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return gradient @ (weight.to(gradient.dtype) * scale[:, None])


product8.register_fake(lambda x, weight, scale: x.new_empty(*x.shape[:-1], weight.shape[0]))
product8_backward.register_fake(lambda gradient, weight, scale: gradient.new_empty(*gradient.shape[:-1], weight.shape[1]))
product8.register_autograd(
    lambda ctx, gradient: (product8_backward(gradient, *ctx.saved_tensors), None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:]),
)


PRODUCTS: dict[str, Callable[..., Tensor]] = {"function": Product.apply, "op": product8}


class Quantised(nn.Module):
    def __init__(self, layer: nn.Linear, product: str) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1) / 127
        self.register_buffer("weight", (layer.weight.detach() / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return PRODUCTS[self.product](x, self.weight, self.scale)


def with_adapters(around: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    model = Language().requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, nn.Sequential)
        for k in (0, 3):
            layer = block[k]
            assert isinstance(layer, nn.Linear)
            block[k] = Adapter(around(layer), layer.in_features, layer.out_features)
    return model


BASES: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "plain": lambda layer: layer,
    "autograd.Function": lambda layer: Quantised(layer, "function"),
    "opaque op": lambda layer: Quantised(layer, "op"),
}


@pytest.mark.parametrize("base", BASES)
def test_adapters_around_frozen_layers(base: str) -> None:
    plain = with_adapters(BASES[base])
    model = copy.deepcopy(plain)
    options = {"loss_fn": loss_fn, "example_targets": (tokens(),), "optimizer": torch.optim.AdamW(trained(model)), "check": True}
    fitted = fit_tight(model, (tokens(),), fraction=0.8, **options)
    train_both(plain, fitted)
    report = fitted.report()
    assert report.measured_peak_bytes <= report.budget_bytes < report.keep_all_peak_bytes
    assert recomputes(fitted)
    assert "bit for bit" in report.check
    assert [p.grad is not None for p in fitted.parameters()] == [p.requires_grad for p in fitted.parameters()]


def test_adapters_of_peft() -> None:
    declare_missing_ops()
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, **sizes))
    base.gradient_checkpointing_enable()
    base.enable_input_require_grads()
    plain = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])).train()
    batch = {"input_ids": tokens(), "labels": tokens()}
    model = copy.deepcopy(plain)
    fitted: Any = memfit.fit(model, batch, budget="1GiB", optimizer=torch.optim.AdamW(trained(model)), check=True)
    for seed in range(3):
        for each in (plain, fitted):
            each.zero_grad()
            torch.manual_seed(seed)
            each(**batch).loss.backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(trained(plain), trained(fitted), strict=True))
    assert fitted.report().num_shapes == 1  # planned once
    with fitted.disable_adapter(), plain.disable_adapter(), torch.no_grad():
        assert torch.equal(fitted.eval()(**batch).logits, plain.eval()(**batch).logits)


class Distilling(nn.Module):
    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher, student

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(tokens).softmax(-1)
        return functional.kl_div(self.student(tokens).log_softmax(-1), wanted, reduction="batchmean")


def test_a_teacher_without_gradients_in_the_students_step() -> None:
    plain = Distilling(Language(depth=6).eval().requires_grad_(False), Language())
    model = copy.deepcopy(plain)
    fitted: Any = memfit.fit(model, (tokens(),), budget="1GiB", optimizer=torch.optim.AdamW(model.student.parameters()), check=True)
    for seed in range(2):
        for each in (plain, fitted):
            each.zero_grad()
            torch.manual_seed(seed)
            each(tokens()).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(trained(plain), trained(fitted), strict=True))
    assert all(p.grad is None for p in fitted.teacher.parameters())
    assert "bit for bit" in fitted.report().check


def binary(logits: Tensor, real: bool) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


class GeneratorStep(nn.Module):
    def __init__(self, generator: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.generator, self.critic = generator, critic

    def forward(self, noise: Tensor) -> Tensor:
        return binary(self.critic(self.generator(noise)), real=True)


class CriticStep(nn.Module):
    def __init__(self, critic: nn.Module) -> None:
        super().__init__()
        self.critic = critic

    def forward(self, real: Tensor, made: Tensor) -> Tensor:
        return binary(self.critic(real), real=True) + binary(self.critic(made), real=False)


class Game:
    """A generator and a critic that play against each other; `steps` may be fitted ones."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
        self.critic = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
        self.optimizers = [torch.optim.Adam(m.parameters(), 1e-3) for m in (self.generator, self.critic)]
        self.real, self.noise = torch.randn(64, 16), torch.randn(64, 8)
        self.steps: list[nn.Module] = [GeneratorStep(self.generator, self.critic), CriticStep(self.critic)]

    def fit(self, budget: int, *, aware: bool = True) -> None:
        """Both in one budget, each beside the other."""
        (generator, critic), (first, second) = self.steps, self.optimizers
        options: dict[str, Any] = {"budget": budget, "time_limit_s": 2, "check": False}
        others = {"others": [(critic, second)]} if aware else {}
        self.critic.requires_grad_(False)
        generating = memfit.fit(generator, (self.noise,), optimizer=first, **others, **options)
        self.critic.requires_grad_(True)
        others = {"others": [(self.generator, first)]} if aware else {}
        self.steps = [generating, memfit.fit(critic, (self.real, self.real), optimizer=second, **others, **options)]

    def play(self, rounds: int) -> list[float]:
        losses = []
        for seed in range(rounds):
            torch.manual_seed(seed)
            with torch.no_grad():
                made = self.generator(self.noise)
            losses.append(self._train(1, self.real, made))
            self.critic.requires_grad_(False)
            losses.append(self._train(0, self.noise))
            self.critic.requires_grad_(True)
        return losses

    def _train(self, which: int, *inputs: Tensor) -> float:
        self.optimizers[which].zero_grad()
        loss = self.steps[which](*inputs)
        loss.backward()
        self.optimizers[which].step()
        return loss.item()


def test_a_generator_and_a_critic_share_one_budget() -> None:
    plain, game = Game(), Game()
    held = 4 * sum(p.nbytes for m in (game.generator, game.critic) for p in m.parameters())
    budget, data = held + 100_000, 2 * game.real.nbytes  # real and made rows, which are there while the generator is trained too
    game.fit(budget - data)
    assert plain.play(3) == game.play(3)
    assert all(torch.equal(p, q) for p, q in zip(plain.generator.parameters(), game.generator.parameters(), strict=True))
    both = nn.ModuleList([game.generator, game.critic])
    both.zero_grad()
    state = [v for o in game.optimizers for entry in o.state.values() for v in entry.values()]
    before = held_bytes(both, None, game.real, game.noise, *state)
    with AllocationMeter() as meter:
        game.play(1)
    assert before + meter.peak <= budget
    unaware = Game()
    unaware.fit(budget - data, aware=False)
    for aware_step, step in zip(game.steps, unaware.steps, strict=True):
        assert aware_step.plan.budget.device_bytes < step.plan.budget.device_bytes  # type: ignore[operator, union-attr]


def test_fitted_models_called_one_after_the_other() -> None:
    """Each fitted alone: gradients go through the critic into the generator, the critic runs twice before a backward."""
    plain, game = Game(), Game()
    results = []
    for play, wrap in ((plain, lambda m, x: m), (game, lambda m, x: memfit.fit(m, (x,), budget="1MiB", time_limit_s=2))):
        generator, critic = wrap(play.generator, play.noise), wrap(play.critic, play.real)
        for seed in range(2):
            torch.manual_seed(seed)
            made = generator(play.noise)
            play.optimizers[1].zero_grad()
            (binary(critic(play.real), real=True) + binary(critic(made.detach()), real=False)).backward()
            play.optimizers[1].step()
            play.optimizers[0].zero_grad()
            binary(critic(made), real=True).backward()
            play.optimizers[0].step()
        results.append([p.detach().clone() for m in (play.generator, play.critic) for p in m.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


def test_what_another_model_holds_is_left_free_to_the_byte() -> None:
    other = nn.Linear(100, 100)
    other.weight.requires_grad_(False)
    weights, optimizer = other.weight.nbytes + other.bias.nbytes, torch.optim.SGD([other.bias], lr=1e-3, momentum=0.9)

    def planned_in(*others: Any) -> int:
        model = nn.Linear(4, 4)
        fitted: Any = memfit.fit(model, (torch.randn(2, 4),), budget="10MB", others=others, check=False)
        return int(fitted.plan.budget.device_bytes)

    alone = planned_in()
    assert alone - planned_in(other) == weights + other.bias.nbytes  # a gradient for what is trained
    assert alone - planned_in((other, optimizer)) == weights + 2 * other.bias.nbytes  # and a momentum
    assert planned_in(other, other) == planned_in(other)
    with pytest.raises(memfit.InfeasibleBudget, match="held outside the step"):
        memfit.fit(nn.Linear(4, 4), (torch.randn(2, 4),), budget="1MB", others=[nn.Linear(1000, 1000)])
    with pytest.raises(memfit.BadInput, match="others has a str"):
        memfit.fit(nn.Linear(4, 4), (torch.randn(2, 4),), budget="1MB", others=["critic"])  # type: ignore[list-item]
