"""Outputs beside the loss that a step leaves out: what stands in for them."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from memfit.core.errors import Unsupported
from memfit.runtime.unread import NotProduced, stand_in


@pytest.fixture
def made() -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """How often values were computed, a loss, and a stand-in beside it."""
    calls: list[int] = []

    def make() -> torch.Tensor:
        calls.append(1)
        return torch.arange(6.0).view(2, 3)

    loss = nn.Parameter(torch.ones(())) * 2
    return calls, loss, stand_in(torch.empty(2, 3), make, loss)


def test_nothing_is_computed_while_only_its_form_is_asked(made: Any) -> None:
    calls, loss, output = made
    half, apart = output.to(torch.bfloat16), output.detach()
    assert (output.shape, output.dtype, output.device.type, output.requires_grad) == ((2, 3), torch.float32, "cpu", True)
    assert (half.dtype, half.shape, type(output.float()), type(apart)) == (torch.bfloat16, (2, 3), NotProduced, NotProduced)
    assert not apart.requires_grad
    assert "NotProduced" in repr(output)
    loss.backward()
    assert calls == []
    assert torch.equal(half + 0, torch.arange(6.0).view(2, 3).bfloat16())


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.argmax(-1),
        lambda t: t[:, -1],
        lambda t: t.detach().cpu().numpy().sum(),
        lambda t: t.detach().tolist(),
        lambda t: t.sum().item(),
        lambda t: torch.cat([t, t]),
        lambda t: t @ torch.ones(3, 2),
        lambda t: copy.deepcopy(t.detach()),
        lambda t: pickle.loads(pickle.dumps(t.detach())),
        lambda t: torch.nn.functional.cross_entropy(t, torch.tensor([0, 1])),
        lambda t: torch.equal(t, t),
    ],
)
def test_values_are_computed_once_when_they_are_read(made: Any, read: Any) -> None:
    calls, _, output = made
    wanted = read(torch.arange(6.0).view(2, 3))
    for _ in range(2):
        found = read(output)
        assert torch.equal(found.detach(), wanted) if isinstance(found, torch.Tensor) else found == wanted
        assert type(found) is type(wanted)
    assert len(calls) == 1


def test_a_saved_one_is_a_plain_tensor(made: Any) -> None:
    file = io.BytesIO()
    torch.save({"logits": made[2].detach()}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["logits"], torch.arange(6.0).view(2, 3))


def test_a_gradient_through_it_is_refused_and_not_lost(made: Any) -> None:
    _, loss, output = made
    with pytest.raises(Unsupported, match="keep_outputs=True"):
        (loss + output.square().mean()).backward()
