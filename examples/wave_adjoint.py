"""Full-waveform inversion in NumPy inside a memory budget: find a wave speed from what receivers recorded.

The 2-D wave equation runs forward for some hundred steps; the gradient of the misfit needs every state again, backwards. Keeping all
of them takes far more than the budget, so `memfit.run_chain` keeps a few in memory and a few on disk and recomputes the rest.
The gradient is checked against finite differences before it is used.

    python examples/wave_adjoint.py --size 96 --steps 600 --budget 3MB --disk 20MB
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import memfit
from memfit.core.units import format_bytes

Field = npt.NDArray[np.float64]
State = dict[str, Field]


def laplacian(u: Field) -> Field:
    """Five points, zero outside: symmetric, so it is its own adjoint."""
    out = -4.0 * u
    out[1:] += u[:-1]
    out[:-1] += u[1:]
    out[:, 1:] += u[:, :-1]
    out[:, :-1] += u[:, 1:]
    return out


@dataclass
class Wave:
    """u_{i+1} = 2 u_i - u_{i-1} + m laplacian(u_i) + source_i, recorded along one line; m = (speed dt / dx)^2 is what is sought."""

    size: int
    num_steps: int
    records: Field = field(default_factory=lambda: np.zeros((0, 0)))

    def start(self) -> State:
        return {"u": np.zeros((self.size, self.size)), "previous": np.zeros((self.size, self.size))}

    def source(self, i: int) -> float:
        t = (i - 20) / 6.0
        return float((1 - t * t) * np.exp(-t * t / 2))

    def step(self, x: State, i: int, m: Field) -> State:
        u = 2 * x["u"] - x["previous"] + m * laplacian(x["u"])
        u[self.size // 2, 3] += self.source(i)
        return {"u": u, "previous": x["u"]}

    def residual(self, x: State, i: int) -> Field:
        """What the receivers would record now, less what they did record."""
        return x["u"][:, -4] - self.records[i]

    def adjoint(self, x: State, y: State, i: int, m: Field) -> State:
        """The transpose of `step` around x_i, plus the misfit's own derivative at step i; the gradient of m is summed on the way."""
        a = y["u"]
        u = 2 * a + laplacian(m * a) + y["previous"]
        u[:, -4] += self.residual(x, i)
        return {"u": u, "previous": -a, "gradient": y["gradient"] + a * laplacian(x["u"])}

    def seed(self, x: State) -> State:
        u = np.zeros_like(x["u"])
        u[:, -4] = self.residual(x, self.num_steps)
        return {"u": u, "previous": np.zeros_like(u), "gradient": np.zeros_like(u)}

    def record(self, m: Field) -> Field:
        x, rows = self.start(), []
        for i in range(self.num_steps):
            rows.append(x["u"][:, -4].copy())
            x = self.step(x, i, m)
        return np.array([*rows, x["u"][:, -4]])

    def misfit(self, m: Field) -> float:
        return 0.5 * float(((self.record(m) - self.records) ** 2).sum())

    def gradient(self, m: Field, **storage: Any) -> tuple[Field, Any]:
        run = memfit.run_chain(
            lambda x, i: self.step(x, i, m),
            lambda x, y, i: self.adjoint(x, y, i, m),
            self.start(),
            self.num_steps,
            seed=self.seed,
            adjoint_bytes=3 * m.nbytes,
            **storage,
        )
        return run.adjoint["gradient"], run


def true_medium(size: int) -> Field:
    y, x = np.mgrid[:size, :size] / size
    return 0.16 + 0.06 * np.exp(-((x - 0.5) ** 2 + (y - 0.45) ** 2) / 0.02)


def check_gradient(wave: Wave, m: Field, gradient: Field) -> float:
    """The relative error of the gradient along a smooth random direction, against central differences."""
    rng = np.random.default_rng(0)
    direction = rng.normal(size=m.shape)
    for _ in range(4):
        direction += 0.2 * laplacian(direction)
    direction /= np.abs(direction).max()
    step = 1e-6
    measured = (wave.misfit(m + step * direction) - wave.misfit(m - step * direction)) / (2 * step)
    return abs(float((gradient * direction).sum()) - measured) / abs(measured)


def descend(wave: Wave, m: Field, iterations: int, **storage: Any) -> tuple[Field, list[float]]:
    """Steepest descent with a step that halves until the misfit falls."""
    losses, length = [wave.misfit(m)], 0.01
    for _ in range(iterations):
        gradient, _ = wave.gradient(m, **storage)
        direction = -gradient / np.abs(gradient).max()
        while length > 1e-6 and wave.misfit(np.clip(m + length * direction, 0.05, 0.45)) >= losses[-1]:
            length /= 2
        m = np.clip(m + length * direction, 0.05, 0.45)
        losses.append(wave.misfit(m))
        length *= 1.5
    return m, losses


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=96, help="grid points each way")
    parser.add_argument("--steps", type=int, default=600, help="time steps")
    parser.add_argument("--budget", default="3MB", help="memory for states and adjoints")
    parser.add_argument("--disk", default="20MB", help="disk for checkpoints")
    parser.add_argument("--iterations", type=int, default=5, help="steps of descent")
    options = parser.parse_args(arguments)
    wave = Wave(options.size, options.steps)
    wave.records = wave.record(true_medium(options.size))
    guess = np.full((options.size, options.size), 0.16)
    with tempfile.TemporaryDirectory() as folder:
        storage = {"budget": options.budget, "disk": options.disk, "folder": folder}
        gradient, run = wave.gradient(guess, progress=sys.stderr.isatty(), **storage)
        error = check_gradient(wave, guess, gradient)
        state_bytes = 2 * guess.nbytes
        print(f"keeping every state       {format_bytes(options.steps * state_bytes)}")
        print(f"budget                    {options.budget} of memory, {options.disk} of disk; slots {run.slots}")
        print(f"held at most              {format_bytes(run.peak_bytes)} of states and adjoints in memory")
        print(
            f"forward steps             {run.num_forward} for {options.steps} ({run.num_forward / options.steps:.2f} each), {run.seconds:.2f} s"
        )
        print(f"written, read             {run.writes}, {run.reads}")
        print(f"gradient, relative error  {error:.1e} against central differences")
        _, losses = descend(wave, guess, options.iterations, **storage)
    print("misfit                    " + " -> ".join(f"{x:.4g}" for x in losses))
    return 0 if error < 1e-6 and losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
