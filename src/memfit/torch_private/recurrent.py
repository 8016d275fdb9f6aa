"""Recurrent layers traced as what they compute.

- The traced form of multi-layer recurrent networks forgets the dropout between layers (torch 2.13 and before).
- On the CPU recurrent layers are one oneDNN call whose workspace tracing does not know: they are traced as cells instead.
- A cell calls `torch.nn.functional.linear` by its name, which a script may have replaced; the layer itself never does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit.torch_private.patch import Patch, patch_torch
from memfit.torch_private.probe import Symbol, is_tested

_DECOMPOSITIONS = Symbol("torch._decomp.decompositions", "trace recurrent layers")
_SELECT = Symbol("torch._C._select_conv_backend", "trace convolutions beside recurrent layers")
_GET_MKLDNN = Symbol("torch._C._get_mkldnn_enabled", "trace recurrent layers")
_SET_MKLDNN = Symbol("torch._C._set_mkldnn_enabled", "trace recurrent layers")
_LINEAR = Symbol("torch._C._nn.linear", "trace recurrent layers")


@contextmanager
def trace_as_cells(model: nn.Module) -> Iterator[None]:
    """Recurrent layers are traced as cells, with dropout between the layers. Convolutions keep oneDNN, which gives other layouts.

    On a torch that is not tested nothing is patched for a model that has no recurrent layer.
    """
    if not is_tested() and not any(isinstance(m, nn.RNNBase) for m in model.modules()):
        yield
        return
    decompositions, select, enable = _DECOMPOSITIONS(), _SELECT(), _SET_MKLDNN()
    was_enabled = _GET_MKLDNN()()

    def select_with_mkldnn(*args: Any, **kwargs: Any) -> Any:
        enable(was_enabled)
        try:
            return select(*args, **kwargs)
        finally:
            enable(False)

    functions = SimpleNamespace(**{**vars(functional), "linear": _LINEAR()})
    patches = [Patch(torch._C, "_select_conv_backend", select_with_mkldnn), Patch(decompositions, "F", functions)]
    helper = getattr(decompositions, "_rnn_helper", None)
    if helper is not None:
        patches.append(Patch(decompositions, "_rnn_helper", _run_layer_by_layer(helper)))
    with patch_torch("trace recurrent layers", *patches):
        enable(False)
        try:
            yield
        finally:
            enable(was_enabled)


def _run_layer_by_layer(helper: Any) -> Any:
    def run(
        x: Tensor,
        hidden: Any,
        params: Any,
        biases: Any,
        layers: int,
        dropout: float,
        train: bool,
        both: bool,
        batch_first: bool,
        layer: Any,
    ) -> Any:
        x = x.transpose(0, 1) if batch_first else x
        width = 2 if both else 1
        last: list[Any] = []
        for i in range(layers):
            own = slice(width * i, width * (i + 1))
            x, states = helper(x, hidden[own], params[own], biases, 1, 0.0, train, both, False, layer)
            last.extend(_reshape_like(given, state) for state, given in zip(states, hidden[own], strict=True))
            if dropout and train and i < layers - 1:
                x = torch.dropout(x, dropout, train=True)
        return (x.transpose(0, 1) if batch_first else x), last

    return run


def _reshape_like(given: Any, state: Any) -> Any:
    """A layer's last state like its first: of an LSTM, which has two, torch 2.11 gives them with a dimension too many."""
    if not isinstance(given, Tensor):
        return tuple(map(_reshape_like, given, state))
    return state if state.shape == given.shape else state.view(given.shape)
