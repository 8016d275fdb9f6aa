"""Which outputs are views, and what a fresh one takes."""

from __future__ import annotations

import pytest
import torch

from memfit.capture.lower.storages import allocated_bytes, viewed_argument
from memfit.core.errors import Unsupported

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "argument"),
    [
        (aten.view.default, 0),
        (aten.t.default, 0),
        (aten._unsafe_view.default, 0),
        (aten.split.Tensor, 0),
        (aten.unbind.int, 0),
        (aten.expand.default, 0),
        (aten.add.Tensor, None),
        (aten.native_batch_norm.default, None),
        (aten.clone.default, None),
    ],
)
def test_views(op: object, argument: int | None) -> None:
    assert viewed_argument(op, 0) == argument


def test_an_op_that_writes_into_its_input_is_refused() -> None:
    with pytest.raises(Unsupported, match="add_"):
        viewed_argument(aten.add_.Tensor, 0)


def test_bytes_follow_strides_and_granularity() -> None:
    assert allocated_bytes(torch.empty(3, 5), 1) == 60
    assert allocated_bytes(torch.empty(3, 5), 512) == 512
    assert allocated_bytes(torch.empty(0, 5), 512) == 0
    assert allocated_bytes(torch.empty(4).expand(3, 4), 1) == 16
    assert allocated_bytes(torch.empty_strided((2, 2), (10, 1)), 1) == 12 * 4
    with pytest.raises(Unsupported, match="to_dense"):
        allocated_bytes(torch.eye(3).to_sparse(), 1)
