"""What one op does to slices of the batch: may it run on a slice alone, and what is its result then (`batch_states` has the words)?

Sharding rules, with slices in time instead of devices. A rule holds for all values and sizes or there is none: an op that is not in
the table, or not in this way, has no answer. Which inputs are split is a choice of whoever asks and never a guess; the sizes among the
arguments that count samples come back as `Rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memfit.passes.slicing import loss_rules
from memfit.passes.slicing.states import SUMMED, UNIFORM, WHOLE, Answer, Asked, Rows, Split, State

aten, prims = torch.ops.aten, torch.ops.prims
Rule = Callable[[Asked], Answer | None]


def ask(asked: Asked) -> Answer | None:
    """What the op does to slices, or None."""
    target, given = asked.call.target, [state for _, state in asked.given()]
    if loss_rules.find_constant(asked.call) is not None:
        return Answer(makes=(UNIFORM,), args=asked.args, takes={})
    if SUMMED in given or not any(isinstance(state, Split) for state in given):
        return None
    rule = _rule_of(target)
    return None if rule is None else rule(asked)


def _rule_of(target: Any) -> Rule | None:
    tags = getattr(target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return None
    name = str(getattr(target, "overloadpacket", ""))
    if name in _PLANES:
        return _planes
    return _RULES.get(target) or (_pointwise if torch.Tag.pointwise in tags or name == "prims.fma" else None)


# -- each element for itself -------------------------------------------------------------------------------------------


def _pointwise(asked: Asked) -> Answer | None:
    """Shapes are broadcast, so dimensions are counted from the right."""
    found = {
        (state.dim - asked.samples[t].dim(), state.rows) for t, state in asked.given() if isinstance(state, Split)
    }  # more than one: samples in different places
    if len(found) != 1 or len(asked.call.outputs) != 1:
        return None
    ((right, rows),) = found
    takes: dict[int, State] = {}
    for t, state in asked.given():
        shape = asked.samples[t].shape
        is_wide = -right <= len(shape) and shape[right] != 1
        if state is WHOLE and is_wide:
            return None  # a number for each place of the batch, which is not cut
        if state is UNIFORM:
            takes[t] = Split(len(shape) + right, rows) if is_wide else WHOLE
    made = Split(asked.made().dim() + right, rows)
    return asked.answer(made, takes=takes) if asked.made().shape[made.dim] == asked.batch * rows else None


# -- the same numbers under other dimensions ---------------------------------------------------------------------------


def _view(asked: Asked) -> Answer | None:
    """Elements keep their order, so samples stay where the dimensions before them have the same size together."""
    state = asked.split()
    if state is None:
        return None
    shape, sizes = asked.sample(0).shape, asked.made().shape
    before = shape[: state.dim].numel()
    for dim, size in enumerate(sizes):
        if sizes[:dim].numel() == before and size % asked.batch == 0 and size > 0:
            made = Split(dim, size // asked.batch)
            return asked.answer(made, args=(asked.args[0], asked.sized(made)))
    return None


def _permute(asked: Asked) -> Answer | None:
    state, ndim = asked.split(), asked.sample(0).dim()
    if state is None:
        return None
    order = [d % ndim for d in asked.args[1]]
    return asked.answer(Split(order.index(state.dim), state.rows))


def _transpose(asked: Asked) -> Answer | None:
    state, ndim = asked.split(), asked.sample(0).dim()
    if state is None:
        return None
    one, other = (d % ndim for d in asked.args[1:3]) if len(asked.args) > 1 else (0, 1)
    if ndim < 2:
        return asked.answer(state)
    return asked.answer(Split({one: other, other: one}.get(state.dim, state.dim), state.rows))


def _unsqueeze(asked: Asked) -> Answer | None:
    state = asked.split()
    if state is None:
        return None
    new = asked.args[1] % asked.made().dim()
    return asked.answer(Split(state.dim + (new <= state.dim), state.rows))


def _squeeze(asked: Asked) -> Answer | None:
    state, sample = asked.split(), asked.sample(0)
    if state is None or len(asked.args) < 2:
        return None
    dims = {d % sample.dim() for d in (asked.args[1] if isinstance(asked.args[1], (list, tuple)) else [asked.args[1]])}
    if state.dim in dims:  # of a slice it might have one place
        return None
    gone = [d for d in dims if sample.shape[d] == 1]
    return asked.answer(Split(state.dim - sum(d < state.dim for d in gone), state.rows))


def _expand(asked: Asked) -> Answer | None:
    state = asked.split()
    if state is None:
        return None
    made = Split(state.dim + asked.made().dim() - asked.sample(0).dim(), state.rows)
    return asked.answer(made, args=(asked.args[0], asked.sized(made), *asked.args[2:]))


def _select(asked: Asked) -> Answer | None:
    state = asked.split()
    dim = asked.args[1] % asked.sample(0).dim()
    if state is None or dim == state.dim:
        return None
    return asked.answer(Split(state.dim - (dim < state.dim), state.rows))


def _along(position: int, default: int | None = None) -> Rule:
    """Ops that do something along one dimension, named at this place among the arguments, and keep it."""

    def rule(asked: Asked) -> Answer | None:
        state = asked.split()
        dim = asked.args[position] if position < len(asked.args) else default
        if state is None or dim is None or not _is_another(asked, dim, state):
            return None
        return _all_like(asked, state)

    return rule


def _is_another(asked: Asked, dim: int, state: Split) -> bool:
    return bool(dim % asked.sample(0).dim() != state.dim)


def _all_like(asked: Asked, state: Split) -> Answer | None:
    """All tensors in the same state, and so is what is made."""
    takes = {t: state for t, found in asked.given() if found is UNIFORM}
    alike = all(found in (state, UNIFORM) for _, found in asked.given())
    sized = all(
        asked.samples[t].dim() > state.dim and asked.samples[t].shape[state.dim] == asked.batch * state.rows for t, _ in asked.given()
    )
    return asked.answer(*(state for _ in asked.call.outputs), takes=takes) if alike and sized else None


def _cat(asked: Asked) -> Answer | None:
    states = [asked.states[x.tensor] for x in asked.args[0]]
    state = next((s for s in states if isinstance(s, Split)), None)
    dim = asked.args[1] if len(asked.args) > 1 else 0
    if state is None or dim % asked.made().dim() == state.dim:
        return None
    return _all_like(asked, state)


def _scatter(asked: Asked) -> Answer | None:
    """scatter_add(self, dim, index, source): `self` is often a `full`."""
    state = asked.split(2)
    if state is None or asked.args[1] % asked.made().dim() == state.dim:
        return None
    return _all_like(asked, state)


# -- fewer numbers -----------------------------------------------------------------------------------------------------


def _reduced(asked: Asked, *, sums: bool) -> Answer | None:
    state, ndim = asked.split(), asked.sample(0).dim()
    if state is None:
        return None
    dims = asked.args[1] if len(asked.args) > 1 else None
    every = {d % ndim for d in ([dims] if isinstance(dims, int) else dims or range(ndim))}  # no dimensions are all of them
    keeps = (asked.args[2] if len(asked.args) > 2 else asked.call.kwargs.get("keepdim", False)) is True
    if state.dim in every:
        return asked.answer(*(SUMMED for _ in asked.call.outputs)) if sums else None
    moved = 0 if keeps else sum(d < state.dim for d in every)
    return asked.answer(*(Split(state.dim - moved, state.rows) for _ in asked.call.outputs))


def _sum(asked: Asked) -> Answer | None:
    return _reduced(asked, sums=True)


def _within_samples(asked: Asked) -> Answer | None:
    return _reduced(asked, sums=False)


# -- products ----------------------------------------------------------------------------------------------------------


def _mm(asked: Asked) -> Answer | None:
    one, other = asked.state(0), asked.state(1)
    if isinstance(one, Split) and one.dim == 0 and other is WHOLE:
        return asked.answer(one)
    if isinstance(other, Split) and other.dim == 1 and one is WHOLE:
        return asked.answer(other)
    if isinstance(one, Split) and isinstance(other, Split) and (one.dim, other.dim) == (1, 0) and one.rows == other.rows:
        return asked.answer(SUMMED)
    return None


def _addmm(asked: Asked) -> Answer | None:
    """A bias for each column."""
    rows, bias = asked.split(1), asked.sample(0)
    row_bias = bias.dim() == 1 or (bias.dim() == 2 and bias.shape[0] == 1)
    if rows is None or rows.dim != 0 or not asked.are_whole(0, 2) or not row_bias:
        return None
    return asked.answer(rows)


def _bmm(asked: Asked) -> Answer | None:
    one, other = asked.split(0), asked.split(1)
    return asked.answer(one) if one is not None and one == other and one.dim == 0 else None


def _convolution(asked: Asked) -> Answer | None:
    state = asked.split()
    if state is None or state.dim != 0 or not asked.are_whole(1, 2) or asked.sample(0).dim() != asked.sample(1).dim():
        return None
    return asked.answer(state)


def _convolution_backward(asked: Asked) -> Answer | None:
    """(gradient of the output, input, weight, ...) -> gradients of input, weight and bias."""
    change, x = asked.split(0), asked.split(1)
    if change is None or change != x or change.dim != 0 or not asked.are_whole(2) or asked.sample(1).dim() != asked.sample(2).dim():
        return None
    return asked.answer(change, SUMMED, SUMMED)


# -- pools and norms ---------------------------------------------------------------------------------------------------


def _planes(asked: Asked) -> Answer | None:
    """Ops on the last two dimensions; whatever lies before them is independent."""
    state = asked.split()
    if state is None:
        return None
    tensors = [asked.samples[t] for t, _ in asked.given()]
    sizes = [a for a in asked.args if isinstance(a, (list, tuple))]
    planes = all(state.dim < x.dim() - 2 for x in tensors) and all(len(s) <= 2 for s in sizes)
    return _all_like(asked, state) if planes else None


def _layer_norm(asked: Asked) -> Answer | None:
    state, inner = asked.split(), len(asked.args[1])
    if state is None or state.dim >= asked.sample(0).dim() - inner or not asked.are_whole(2, 3):
        return None
    return asked.answer(state, state, state)


def _layer_norm_backward(asked: Asked) -> Answer | None:
    """(gradient, input, shape, mean, deviation, weight, bias, mask)."""
    state, inner = asked.split(), len(asked.args[2])
    alike = all(asked.state(p) == state for p in (1, 3, 4))
    if state is None or not alike or state.dim >= asked.sample(0).dim() - inner or not asked.are_whole(5, 6):
        return None
    return asked.answer(state, SUMMED, SUMMED)


def _group_norm(asked: Asked) -> Answer | None:
    """(input, weight, bias, number of samples, ...)."""
    state = asked.split()
    if state is None or state.dim != 0 or not asked.are_whole(1, 2):
        return None
    return asked.answer(state, state, state, args=(*asked.args[:3], Rows(state.rows), *asked.args[4:]))


def _group_norm_backward(asked: Asked) -> Answer | None:
    """(gradient, input, mean, deviation, weight, number of samples, ...)."""
    state = asked.split()
    if state is None or state.dim != 0 or any(asked.state(p) != state for p in (1, 2, 3)) or not asked.are_whole(4):
        return None
    return asked.answer(state, SUMMED, SUMMED, args=(*asked.args[:5], Rows(state.rows), *asked.args[6:]))


def _constant_norm(asked: Asked) -> Answer | None:
    """(input, weight, bias, mean, variance, ...): batch norm with statistics that are given; of its own it makes none."""
    state = asked.split()
    if state is None or state.dim != 0 or not asked.are_whole(1, 2, 3, 4) or any(asked.made(k).numel() for k in (1, 2)):
        return None
    return asked.answer(state, WHOLE, WHOLE)


def _constant_norm_backward(asked: Asked) -> Answer | None:
    """(gradient, input, weight, mean, variance, saved mean, saved deviation, whether the statistics are the batch's, ...)."""
    state = asked.split()
    if state is None or state.dim != 0 or asked.state(1) != state or not asked.are_whole(2, 3, 4, 5, 6) or asked.args[7]:
        return None
    return asked.answer(state, SUMMED, SUMMED)


def _embedding(asked: Asked) -> Answer | None:
    state = asked.split(1)
    return asked.answer(state) if state is not None and asked.are_whole(0) else None


def _embedding_backward(asked: Asked) -> Answer | None:
    """(gradient, positions, number of rows, padding, whether by frequency)."""
    state = asked.split(1)
    if state is None or asked.state(0) != state or asked.args[4]:
        return None
    return asked.answer(SUMMED)


_POINTWISE_TOO = (
    aten.clone.default,
    aten.copy.default,
    aten._to_copy.default,
    aten.detach.default,
    aten.alias.default,
    aten.hardtanh_backward.default,
    aten.native_dropout_backward.default,
    prims.convert_element_type.default,
)
_PLANES = (  # by name: Inductor's own are there only once it is imported
    "prims._low_memory_max_pool_with_offsets",
    "prims._low_memory_max_pool_offsets_to_indices",
    "aten.max_pool2d_with_indices",
    "aten.max_pool2d_with_indices_backward",
    "memfit.max_pool_gradient",
    "aten.avg_pool2d",
    "aten.avg_pool2d_backward",
    "aten._adaptive_avg_pool2d",
    "aten._adaptive_avg_pool2d_backward",
)
_WITHIN = (  # (x, dimensions, keepdim)
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.var_mean.correction,
    aten.logsumexp.default,
    aten.argmax.default,
    aten.argmin.default,
    aten.max.dim,
    aten.min.dim,
    aten.any.dim,
    aten.all.dim,
)


_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_POINTWISE_TOO, _pointwise),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _view),
    aten.permute.default: _permute,
    **dict.fromkeys((aten.transpose.int, aten.t.default), _transpose),
    aten.unsqueeze.default: _unsqueeze,
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims), _squeeze),
    aten.expand.default: _expand,
    aten.select.int: _select,
    aten.slice.Tensor: _along(1, 0),
    aten.gather.default: _along(1),
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), _along(1)),
    **dict.fromkeys((aten._softmax_backward_data.default, aten._log_softmax_backward_data.default), _along(2)),
    aten.cat.default: _cat,
    aten.topk.default: _along(2, -1),
    **dict.fromkeys((aten.scatter_add.default, aten.scatter.src, aten.scatter.value), _scatter),
    aten.slice_backward.default: loss_rules.slice_backward,
    aten.select_backward.default: loss_rules.select_backward,
    **dict.fromkeys((aten.sum.dim_IntList, aten.sum.default), _sum),
    **dict.fromkeys(_WITHIN, _within_samples),
    aten.linalg_vector_norm.default: loss_rules.norm_of_vectors,
    **dict.fromkeys((aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), loss_rules.nll_loss),
    **dict.fromkeys((aten.nll_loss_backward.default, aten.nll_loss2d_backward.default), loss_rules.nll_loss_backward),
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten._native_batch_norm_legit_no_training.default: _constant_norm,
    aten.native_batch_norm_backward.default: _constant_norm_backward,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
}
