"""The compiler's own rewrites of the whole traced step, done before ours: they look for what the model wrote."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memfit.passes.interface import Context, Level, Numbers, Pass


def _run(module: torch.fx.GraphModule, context: Context) -> Iterable[torch.fx.GraphModule]:
    assert context.compiler is not None
    return (context.compiler.improve(module),)


PREPARE_FOR_COMPILER = Pass(
    name="prepare-for-compiler",
    where="the traced step",
    becomes="Inductor's own passes; biases beside their convolutions",
    saves="padding of matrix products, attention's scores, draws of random seeds",
    level=Level.FX,
    numbers=Numbers.ROUNDS,
    run=_run,
)
