"""Each rule against the op itself: run on slices and put together, it gives what it gives for the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from memfit.capture.captured import OpCall, Ref
from memfit.compilers.inductor.lowerings import lowering
from memfit.kernels.custom_ops import POOL_GRADIENT
from memfit.passes.slicing.rules import ask
from memfit.passes.slicing.states import SUMMED, UNIFORM, WHOLE, Answer, Asked, Rows, Split, State

lowering()  # declares Inductor's own ops
aten, prims = torch.ops.aten, torch.ops.prims
BATCH = 6
S0, S1 = Split(0, 1), Split(1, 1)


class Given:
    """A tensor argument in a state; `value` is what the op is run on."""

    def __init__(self, state: State, *shape: int, value: torch.Tensor | None = None) -> None:
        self.state = state
        self.value = torch.randn(shape, dtype=torch.float64) if value is None else value


def answered(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Answer | None, list[Given], list[torch.Tensor]]:
    """What the rules say, the tensors given, and what the op makes of them whole."""
    given: list[Given] = []

    def refer(value: Any) -> Any:
        if not isinstance(value, Given):
            return value
        given.append(value)
        return Ref(len(given) - 1)

    refs, names = tree_map(refer, (args, kwargs))
    values, options = tree_map(lambda v: v.value if isinstance(v, Given) else v, (args, kwargs))
    made = target(*values, **options)
    outputs = list(made) if isinstance(made, (tuple, list)) else [made]
    ids = tuple(range(len(given), len(given) + len(outputs)))
    call = OpCall(target=target, args=refs, kwargs=names, outputs=ids, unpack=isinstance(made, (tuple, list)))
    samples = {k: v for k, v in enumerate([*(g.value for g in given), *outputs]) if isinstance(v, torch.Tensor)}
    answer = ask(Asked(call=call, batch=BATCH, samples=samples, states={k: g.state for k, g in enumerate(given)}))
    return answer, given, outputs


def by_slices(target: Any, answer: Answer, given: list[Given], kwargs: dict[str, Any], counts: tuple[int, ...]) -> list[list[torch.Tensor]]:
    """What each slice gives."""
    results, start = [], 0
    for count in counts:

        def cut(value: Any, start: int = start, count: int = count) -> Any:
            if isinstance(value, Rows):
                return value.each * count
            if not isinstance(value, Ref):
                return value
            state = answer.takes.get(value.tensor, given[value.tensor].state)
            whole = given[value.tensor].value
            return whole.narrow(state.dim, start * state.rows, count * state.rows) if isinstance(state, Split) else whole

        made = target(*tree_map(cut, answer.args), **tree_map(lambda v: v.value if isinstance(v, Given) else v, kwargs))
        results.append(list(made) if isinstance(made, (tuple, list)) else [made])
        start += count
    return results


def check(target: Any, *args: Any, makes: tuple[State, ...], **kwargs: Any) -> None:
    answer, given, whole = answered(target, args, kwargs)
    assert answer is not None
    assert answer.makes == makes
    for counts in ((2, 2, 2), (4, 2), (1, 5)):
        parts = by_slices(target, answer, given, kwargs, counts)
        for k, (state, expected) in enumerate(zip(answer.makes, whole, strict=True)):
            found = [part[k] for part in parts]
            together = torch.cat(found, state.dim) if isinstance(state, Split) else torch.stack(found).sum(0)
            torch.testing.assert_close(together, expected, rtol=1e-12, atol=1e-12)


def refuse(target: Any, *args: Any, **kwargs: Any) -> None:
    answer, _, _ = answered(target, args, kwargs)
    assert answer is None


def x(*shape: int, state: State = S0) -> Given:
    return Given(state, *shape)


def w(*shape: int) -> Given:
    return Given(WHOLE, *shape)


def positions(state: State, high: int, *shape: int) -> Given:
    return Given(state, value=torch.randint(0, high, shape))


def test_pointwise_ops_and_broadcasting() -> None:
    check(aten.relu.default, x(BATCH, 3), makes=(S0,))
    check(aten.add.Tensor, x(BATCH, 3, 4), w(4), makes=(S0,))
    check(aten.add.Tensor, x(BATCH, 3, 4), w(1, 3, 1), makes=(S0,), alpha=2)
    check(aten.mul.Tensor, x(2, BATCH, state=S1), x(BATCH, state=S0), makes=(S1,))  # the same dimension, counted from the right
    check(aten.where.self, Given(S0, value=torch.rand(BATCH, 2) > 0.5), w(), x(BATCH, 2), makes=(S0,))
    check(aten.threshold_backward.default, x(BATCH, 3), x(BATCH, 3), 0, makes=(S0,))
    check(aten.gelu_backward.default, x(BATCH, 3), x(BATCH, 3), makes=(S0,))
    for same in (aten.detach.default, aten.alias.default):
        check(same, x(BATCH, 3), makes=(S0,))
    check(aten._to_copy.default, x(BATCH, 3), makes=(S0,), dtype=torch.float32)
    check(aten.hardtanh_backward.default, x(BATCH, 3), x(BATCH, 3), -1, 1, makes=(S0,))
    check(aten.clone.default, x(BATCH, 3, 4, 4), makes=(S0,), memory_format=torch.channels_last)
    check(prims.convert_element_type.default, x(BATCH, 3), torch.float32, makes=(S0,))
    check(aten.native_dropout_backward.default, x(BATCH, 3), Given(S0, value=torch.rand(BATCH, 3) > 0.5), 2.0, makes=(S0,))
    zero = Given(UNIFORM, value=torch.zeros(BATCH, 1, dtype=torch.float64))
    check(aten.add.Tensor, x(BATCH, 3), zero, makes=(S0,))
    refuse(aten.add.Tensor, x(BATCH, 3), w(BATCH, 3))  # a weight for each place of the batch
    refuse(aten.add.Tensor, x(BATCH, BATCH), x(BATCH, BATCH, state=S1))  # samples in different places
    refuse(aten.add.Tensor, x(BATCH, 3), x(BATCH, 3, state=SUMMED))  # not known before the last slice
    refuse(aten.bernoulli.p, x(BATCH, 3), 0.5)  # random numbers
    refuse(aten.relu.default, w(BATCH, 3))  # nothing is split


def test_a_constant_is_uniform() -> None:
    answer, _, _ = answered(aten.full.default, ([BATCH, 3], 0.0), {})
    assert answer is not None
    assert answer.makes == (UNIFORM,)


def test_views() -> None:
    check(aten.view.default, x(BATCH, 3, 4, 5), [BATCH * 3, 20], makes=(Split(0, 3),))
    check(aten.view.default, x(BATCH * 3, 20, state=Split(0, 3)), [BATCH, 3, 4, 5], makes=(S0,))
    check(aten.view.default, x(BATCH, 12), [BATCH, -1, 4], makes=(S0,))
    check(aten.view.default, x(2, BATCH, 4, state=S1), [2, BATCH * 4], makes=(Split(1, 4),))
    check(aten.view.default, x(BATCH, 4), [1, BATCH, 4], makes=(S1,))
    check(aten._unsafe_view.default, x(BATCH, 3, 4), [BATCH, 12], makes=(S0,))
    check(aten.reshape.default, x(BATCH, 3, 4), [BATCH * 3, 4], makes=(Split(0, 3),))
    refuse(aten.view.default, x(2, BATCH, 4, state=S1), [2 * BATCH, 4])  # samples lie apart in the new dimension
    refuse(aten.view.default, x(BATCH, 4), [4, BATCH])
    check(aten.permute.default, x(BATCH, 3, 4), [2, 0, 1], makes=(S1,))
    check(aten.transpose.int, x(BATCH, 3, 4), 0, -1, makes=(Split(2, 1),))
    check(aten.t.default, x(BATCH, 3), makes=(S1,))
    check(aten.unsqueeze.default, x(BATCH, 3), 0, makes=(S1,))
    check(aten.unsqueeze.default, x(BATCH, 3), -1, makes=(S0,))
    check(aten.squeeze.dim, x(1, BATCH, 3, state=S1), 0, makes=(S0,))
    check(aten.squeeze.dims, x(BATCH, 1, 3, 1), [1, 3], makes=(S0,))
    refuse(aten.squeeze.dim, x(BATCH, 3), 0)  # a slice of one sample would lose the dimension
    check(aten.expand.default, x(BATCH, 1, 1), [BATCH, 3, 4], makes=(S0,))
    check(aten.expand.default, x(BATCH, 1), [2, BATCH, 3], makes=(S1,))
    check(aten.select.int, x(2, BATCH, 3, state=S1), 0, 1, makes=(S0,))
    refuse(aten.select.int, x(BATCH, 3), 0, 1)
    check(aten.slice.Tensor, x(BATCH, 5), 1, 1, 4, makes=(S0,))
    refuse(aten.slice.Tensor, x(BATCH, 5), 0, 1, 4)
    check(aten.cat.default, [x(BATCH, 2), x(BATCH, 3)], 1, makes=(S0,))
    refuse(aten.cat.default, [x(BATCH, 3), x(BATCH, 3)], 0)
    refuse(aten.cat.default, [x(BATCH, 3), w(BATCH, 3)], 1)


def test_reductions() -> None:
    check(aten.sum.dim_IntList, x(BATCH, 3, 4), [0, 2], makes=(SUMMED,))
    check(aten.sum.dim_IntList, x(BATCH, 3), [0], True, makes=(SUMMED,))
    check(aten.sum.default, x(BATCH, 3), makes=(SUMMED,))
    check(aten.sum.dim_IntList, x(2, BATCH, 3, state=S1), [0], makes=(S0,))
    check(aten.sum.dim_IntList, x(2, BATCH, 3, state=S1), [0], True, makes=(S1,))
    check(aten.mean.dim, x(BATCH, 3, 4), [-1], True, makes=(S0,))
    check(aten.amax.default, x(BATCH, 3), [1], makes=(S0,))
    check(aten.amin.default, x(2, BATCH, state=S1), [0], makes=(S0,))
    check(aten.var_mean.correction, x(BATCH, 3, 4), [1, 2], makes=(S0, S0), correction=0, keepdim=True)
    refuse(aten.mean.dim, x(BATCH, 3), [0])
    refuse(aten.amax.default, x(BATCH, 3))  # over all
    refuse(aten.var_mean.correction, x(BATCH, 3, 4, 4), [0, 2, 3], correction=0, keepdim=True)  # batch norm
    check(aten._softmax.default, x(BATCH, 3), 1, False, makes=(S0,))
    check(aten._log_softmax.default, x(BATCH, 3), -1, False, makes=(S0,))
    check(aten._log_softmax_backward_data.default, x(BATCH, 3), x(BATCH, 3), 1, torch.float64, makes=(S0,))
    check(aten._softmax_backward_data.default, x(BATCH, 3), x(BATCH, 3), 1, torch.float64, makes=(S0,))
    refuse(aten._softmax.default, x(BATCH, 3), 0, False)


def test_products() -> None:
    check(aten.mm.default, x(BATCH * 2, 3, state=Split(0, 2)), w(3, 4), makes=(Split(0, 2),))
    check(aten.mm.default, w(4, 3), x(3, BATCH, state=S1), makes=(S1,))
    check(aten.mm.default, x(3, BATCH, state=S1), x(BATCH, 4), makes=(SUMMED,))
    refuse(aten.mm.default, x(BATCH, 3), x(3, BATCH, state=S1))
    refuse(aten.mm.default, x(3, BATCH, state=S1), w(BATCH, 4))
    check(aten.addmm.default, w(4), x(BATCH, 3), w(3, 4), makes=(S0,))
    refuse(aten.addmm.default, w(BATCH, 4), x(BATCH, 3), w(3, 4))
    check(aten.bmm.default, x(BATCH * 2, 3, 4, state=Split(0, 2)), x(BATCH * 2, 4, 5, state=Split(0, 2)), makes=(Split(0, 2),))
    refuse(aten.bmm.default, x(BATCH, 3, 4), w(BATCH, 4, 5))


CONVOLUTION = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def test_convolutions() -> None:
    check(aten.convolution.default, x(BATCH, 3, 5, 5), w(4, 3, 3, 3), w(4), *CONVOLUTION, makes=(S0,))
    check(aten.convolution.default, x(BATCH, 4, 5, 5), w(4, 1, 3, 3), None, [2, 2], [1, 1], [1, 1], False, [0, 0], 4, makes=(S0,))
    check(aten.convolution.default, x(BATCH, 4, 5, 5), w(4, 3, 2, 2), None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1, makes=(S0,))
    change = x(BATCH, 4, 5, 5)
    check(
        aten.convolution_backward.default,
        *(change, x(BATCH, 3, 5, 5), w(4, 3, 3, 3), [4], *CONVOLUTION, [True, True, True]),
        makes=(S0, SUMMED, SUMMED),
    )
    refuse(aten.convolution.default, x(3, BATCH, 5, 5, state=S1), w(4, BATCH, 3, 3), None, *CONVOLUTION)  # samples as channels
    refuse(aten.convolution.default, w(2, 3, 5, 5), x(BATCH, 3, 3, 3), None, *CONVOLUTION)  # samples as weights


def test_pools() -> None:
    pool = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    check(aten.max_pool2d_with_indices.default, x(BATCH, 3, 4, 4), *pool, makes=(S0, S0))
    inner, (made, where) = torch.randn(BATCH, 3, 4, 4, dtype=torch.float64), (None, None)
    made, where = aten.max_pool2d_with_indices.default(inner, *pool)
    check(
        aten.max_pool2d_with_indices_backward.default,
        *(x(*made.shape), Given(S0, value=inner), *pool, Given(S0, value=where)),
        makes=(S0,),
    )
    check(prims._low_memory_max_pool_with_offsets.default, x(BATCH, 3, 4, 4), *pool, makes=(S0, S0))
    _, offsets = prims._low_memory_max_pool_with_offsets.default(inner, *pool)
    check(
        prims._low_memory_max_pool_offsets_to_indices.default,
        *(Given(S0, value=offsets), [2, 2], [4, 4], [2, 2], [0, 0], [1, 1]),
        makes=(S0,),
    )
    check(POOL_GRADIENT, x(*made.shape), Given(S0, value=offsets), [2, 2], [2, 2], [0, 0], [4, 4], makes=(S0,))
    check(aten.avg_pool2d.default, x(BATCH, 3, 4, 4), [2, 2], [2, 2], makes=(S0,))
    check(aten.avg_pool2d_backward.default, x(BATCH, 3, 2, 2), x(BATCH, 3, 4, 4), [2, 2], [2, 2], [0, 0], False, True, None, makes=(S0,))
    check(aten._adaptive_avg_pool2d.default, x(BATCH, 3, 5, 5), [2, 2], makes=(S0,))
    check(aten._adaptive_avg_pool2d_backward.default, x(BATCH, 3, 2, 2), x(BATCH, 3, 5, 5), makes=(S0,))
    refuse(aten.max_pool2d_with_indices.default, x(2, 3, BATCH, 4, state=Split(2, 1)), *pool)  # windows over samples


def test_scatter_into_a_constant_and_gather() -> None:
    zeros = Given(UNIFORM, value=torch.zeros(BATCH * 3, 8, dtype=torch.float64))
    by_three = Split(0, 3)
    index = positions(by_three, 8, BATCH * 3, 4)
    check(aten.scatter_add.default, zeros, 1, index, x(BATCH * 3, 4, state=by_three), makes=(by_three,))
    refuse(aten.scatter_add.default, zeros, 0, positions(by_three, 3, BATCH * 3, 4), x(BATCH * 3, 4, state=by_three))
    check(aten.gather.default, x(BATCH, 5), 1, positions(S0, 5, BATCH, 2), makes=(S0,))
    refuse(aten.gather.default, x(BATCH, 5), 0, positions(S0, BATCH, BATCH, 2))


def test_norms_of_samples() -> None:
    check(aten.native_layer_norm.default, x(BATCH, 3, 4), [4], w(4), w(4), 1e-5, makes=(S0, S0, S0))
    refuse(aten.native_layer_norm.default, x(3, BATCH, state=S1), [BATCH], w(BATCH), w(BATCH), 1e-5)
    inner = torch.randn(BATCH, 3, 4, dtype=torch.float64)
    _, mean, deviation = aten.native_layer_norm.default(inner, [4], None, None, 1e-5)
    given = (Given(S0, value=inner), [4], Given(S0, value=mean), Given(S0, value=deviation), w(4), w(4), [True, True, True])
    check(aten.native_layer_norm_backward.default, x(BATCH, 3, 4), *given, makes=(S0, SUMMED, SUMMED))
    check(aten.native_group_norm.default, x(BATCH, 4, 3, 3), w(4), w(4), BATCH, 4, 9, 2, 1e-5, makes=(S0, S0, S0))
    planes = torch.randn(BATCH, 4, 3, 3, dtype=torch.float64)
    _, mean, deviation = aten.native_group_norm.default(planes, None, None, BATCH, 4, 9, 2, 1e-5)
    statistics = (Given(S0, value=mean), Given(S0, value=deviation))
    check(
        aten.native_group_norm_backward.default,
        *(x(BATCH, 4, 3, 3), Given(S0, value=planes), *statistics, w(4), BATCH, 4, 9, 2, [True, True, True]),
        makes=(S0, SUMMED, SUMMED),
    )


def test_batch_norm_with_constant_statistics() -> None:
    weight, bias, mean = w(3), w(3), w(3)
    variance = Given(WHOLE, value=torch.rand(3, dtype=torch.float64) + 0.5)
    given = (weight, bias, mean, variance, 0.1, 1e-5)
    answer, tensors, whole = answered(aten._native_batch_norm_legit_no_training.default, (x(BATCH, 3, 4, 4), *given), {})
    assert answer is not None
    assert answer.makes == (S0, WHOLE, WHOLE)
    parts = by_slices(aten._native_batch_norm_legit_no_training.default, answer, tensors, {}, (4, 2))
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), whole[0], rtol=1e-12, atol=1e-12)
    empty = Given(WHOLE, value=torch.empty(0, dtype=torch.float64))
    change, inner = x(BATCH, 3, 4, 4), x(BATCH, 3, 4, 4)
    for training, saved in ((False, (empty, empty)), (True, (mean, variance))):
        case = (change, inner, weight, mean, variance, *saved, training, 1e-5, [True, True, True])
        if training:
            refuse(aten.native_batch_norm_backward.default, *case)
        else:
            check(aten.native_batch_norm_backward.default, *case, makes=(S0, SUMMED, SUMMED))


def test_embeddings() -> None:
    tokens = positions(S0, 7, BATCH, 3)
    check(aten.embedding.default, w(7, 4), tokens, makes=(S0,))
    check(aten.embedding_dense_backward.default, x(BATCH, 3, 4), tokens, 7, -1, False, makes=(SUMMED,))
    refuse(aten.embedding_dense_backward.default, x(BATCH, 3, 4), tokens, 7, -1, True)  # how often a word occurs in the batch


@pytest.mark.parametrize("target", [aten.cumsum.default, aten.flip.default, aten.roll.default, aten.sort.default])
def test_what_nobody_described_has_no_answer(target: Any) -> None:
    extra = {aten.flip.default: ([1],), aten.roll.default: ([1], [1])}.get(target, (1,))
    refuse(target, x(BATCH, 3), *extra)
