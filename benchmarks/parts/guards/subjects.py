"""Small models with much that a trace may depend on: numbers, flags, lists, configs, closures, globals, state that forward writes."""

from __future__ import annotations

import enum
import functools
import os
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

GAIN = 1.0
SETTINGS = {"gain": 1.0}


class Way(enum.Enum):
    SUM = 1
    MEAN = 2


@dataclass
class Config:
    gain: float = 1.0
    power: int = 1
    twice: bool = False
    way: Way = Way.MEAN


def shift(x: Tensor) -> Tensor:
    return x + 0.25


class Subject(nn.Module):
    """What all of them read."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.bias_on, self.power, self.name = 1.0, True, 1, "plain"
        self.order, self.table, self.pair = [0, 1], {"gain": 1.0}, (1.0, 2)
        self.config, self.space = Config(), types.SimpleNamespace(gain=1.0)
        self.activation: Any = functional.relu
        self.register_buffer("offset", torch.zeros(1))
        self.seen: list[int] = []
        self.calls = 0

    def adjust(self, x: Tensor) -> Tensor:
        x = (
            self.activation(x)
            * self.gain
            * self.table["gain"]
            * self.config.gain
            * self.space.gain
            * GAIN
            * SETTINGS["gain"]
            * self.pair[0]
        )
        for k in self.order:
            x = x + 0.1 * k
        if self.config.twice:
            x = x * 2
        if self.config.way is Way.SUM:
            x = x * 3
        if self.bias_on:
            x = shift(x)
        if self.name != "plain":
            x = -x
        return x**self.power * float(os.environ.get("SUBJECT_GAIN", "1")) + self.offset


class Mlp(Subject):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.adjust(self.norm(self.first(x)))))


class Convolutions(Subject):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(0.1), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1)
        )
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.adjust(self.body(x)).mean((2, 3)))


class Words(Subject):
    """An embedding tied to the head, attention, layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.attend = nn.Embedding(12, 8), nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x))
        h = h + self.attend(h, h, h, need_weights=False)[0]
        return self.head(h + self.mlp(self.adjust(h))).mean(1)


class Broken(Subject):
    """Dynamo has no single graph for it: a branch on a value that is always taken the same way, inside what only it refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4)

    @torch._dynamo.disable  # as a C extension or a library that opted out
    def middle(self, x: Tensor) -> Tensor:
        return self.adjust(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.middle(self.first(x))))


class Recurrent(Subject):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.adjust(self.cells(x)[0][:, -1]))


class Writes(Subject):
    """Forward leaves things behind: a list, a counter in a buffer, an attribute, an output of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.shape[0])
        self.count += 1
        h = self.adjust(self.first(x))
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        self.latest = h.detach().amax()
        return self.last(h)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, its batches, and a loss that has settings of its own."""

    model: nn.Module
    loss_fn: Any
    batch: Callable[[int], tuple[Tensor, Tensor]]
    weight: dict[str, float] = field(default_factory=dict)  # a closure's cell, so to say: what the loss multiplies with
    extra: list[Any] = field(default_factory=list)  # arguments after the tensor


def _vectors(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(6, 8, generator=g), torch.randint(0, 4, (6,), generator=g)


def _images(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, 8, 8, generator=g), torch.randint(0, 4, (4,), generator=g)


def _tokens(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randint(0, 12, (4, 5), generator=g), torch.randint(0, 12, (4,), generator=g)


def _series(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(4, 5, 8, generator=g), torch.randint(0, 4, (4,), generator=g)


SUBJECTS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "mlp": (Mlp, _vectors),
    "convolutions": (Convolutions, _images),
    "words": (Words, _tokens),
    "broken": (Broken, _vectors),
    "recurrent": (Recurrent, _series),
    "writes": (Writes, _vectors),
}


def make_case(name: str) -> Case:
    """The same every time: parameters come from a fixed seed."""
    torch.manual_seed(0)
    kind, batch = SUBJECTS[name]
    loss, cell = nn.CrossEntropyLoss(), {"weight": 1.0}

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        return loss(out, target) * cell["weight"]

    wrapped = functools.wraps(loss_fn)(loss_fn)
    wrapped.loss = loss  # type: ignore[attr-defined]
    return Case(model=kind(), loss_fn=wrapped, batch=batch, weight=cell)
