"""A training loop on the tape: the same numbers in every memory mode."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from memfit.core.errors import BadInput
from memfit.tape.array_view import Data
from memfit.tape.examples.nets import Net
from memfit.tape.executor import evaluate
from memfit.tape.memory.modes import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One run of training: the loss before every update, how often the largest output is right at the end, the time of all steps."""

    mode: str
    losses: tuple[float, ...]
    accuracy_fraction: float
    seconds: float


def spirals(num: int, classes: int = 3, *, seed: int = 0) -> tuple[Data, Data]:
    """Points on `classes` arms of a spiral with a little noise, and the arm of each: not linearly separable."""
    if num < 1 or classes < 1:
        raise BadInput(f"spirals of {num} points and {classes} classes: at least one of each is needed.")
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, num)
    radius = rng.uniform(0.1, 1.0, num)
    angle = 2 * np.pi * labels / classes + 4 * radius + rng.normal(0, 0.1, num)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1), labels


def train(net: Net, mode: Mode, data: tuple[Data, Data], *, steps: int, rate: float) -> Trained:
    """Full-batch gradient descent with momentum from the present parameters of a classifier, which are put back at the end.

    The mode's program returns the loss and then the gradients of `net.parameters`, in order.
    """
    before = [p.data.copy() for p in net.parameters]
    speed = [np.zeros_like(p.data) for p in net.parameters]
    executor = mode.executor()
    feeds = {net.inputs[0]: data[0], net.targets[0]: data[1]}
    losses = []
    start = time.perf_counter()
    for _ in range(steps):
        loss, *gradients = executor.run(feeds)
        losses.append(float(loss))
        for p, v, g in zip(net.parameters, speed, gradients, strict=True):
            v *= 0.9
            v -= rate * g
            p.data[...] += v
    seconds = time.perf_counter() - start
    (logits,) = evaluate([net.output], {net.inputs[0]: data[0]})
    for p, old in zip(net.parameters, before, strict=True):
        p.data[...] = old
    return Trained(
        mode=mode.name, losses=tuple(losses), accuracy_fraction=float((logits.argmax(axis=1) == data[1]).mean()), seconds=seconds
    )
