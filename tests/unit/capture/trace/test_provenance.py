"""Where in the user's model an op comes from."""

import types
from typing import Any

import pytest

from memfit.capture.trace.provenance import place_of


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("L['model']._modules['h']._modules['0']", "h.0"),
        ("dict(type(L['model'].forward.__self__).__dict__)['_memfit'].model._modules['lm_head']", "lm_head"),  # prepared by accelerate
        ("L['model']", ""),
    ],
)
def test_a_module_is_named_as_the_user_knows_it(path: str, said: str) -> None:
    node: Any = types.SimpleNamespace(meta={"nn_module_stack": {"0": (path, None)}})
    assert place_of(node) == said
