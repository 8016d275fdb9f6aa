"""How a call is flattened, rebuilt and recognised."""

from __future__ import annotations

import pytest
import torch

from memfit.capture.inputs import Call, Inputs
from memfit.core.errors import BadInput


def test_example_inputs_as_people_give_them() -> None:
    x = torch.ones(2)
    assert Inputs.of((x, 3)).args == (x, 3)
    assert Inputs.of([x]).args == (x,)
    assert Inputs.of({"a": x}).kwargs == {"a": x}
    assert Inputs.of(x).args == (x,)
    given = Inputs(x, flag=True)
    assert Inputs.of(given) is given
    with pytest.raises(BadInput, match="int"):
        Inputs.of(3)


def test_a_call_is_rebuilt_with_other_tensors() -> None:
    call = Call.flatten((torch.zeros(2), {"deep": [torch.ones(3), "text"]}), {"flag": None, "n": 5})
    args, kwargs = call.rebuild((torch.ones(2), torch.zeros(3)))
    assert torch.equal(args[0], torch.ones(2))
    assert torch.equal(args[1]["deep"][0], torch.zeros(3))
    assert args[1]["deep"][1] == "text"
    assert kwargs == {"flag": None, "n": 5}


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(3, 2), 1.0),
        (torch.zeros(2, 3, dtype=torch.float64), 1.0),
        (torch.zeros(3, 2).t(), 1.0),
        (torch.zeros(2, 3, requires_grad=True), 1.0),
        (torch.zeros(2, 3), 2.0),
        (torch.zeros(2, 3), 1),
        (torch.zeros(2, 3),),
    ],
    ids=["shape", "type", "layout", "gradient", "value", "kind", "structure"],
)
def test_what_needs_a_plan_of_its_own(other: tuple[object, ...]) -> None:
    key = Call.flatten((torch.zeros(2, 3), 1.0), {}).key()
    assert Call.flatten((torch.ones(2, 3), 1.0), {}).key() == key
    assert Call.flatten(other, {}).key() != key
