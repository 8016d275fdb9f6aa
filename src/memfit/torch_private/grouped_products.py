"""Products of groups of rows (mixtures of experts) traced in every type that their kernels take.

The shape rule that tracing asks refuses all types but bfloat16 (torch 2.13 and before); the kernels take float32 and float16 too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from memfit.torch_private.patch import Patch, patch_torch
from memfit.torch_private.probe import Symbol, is_tested

_NEED = "trace mixtures of experts"
_RULES = Symbol("torch._meta_registrations", _NEED)
_RULE = Symbol("torch._meta_registrations._meta_grouped_mm_common", _NEED, optional=True)
_RESULT = Symbol("torch._meta_registrations._create_grouped_mm_output_tensor", _NEED, optional=True)
_TYPES = (torch.float32, torch.float16)


def trace_grouped_products() -> AbstractContextManager[None]:
    """Inside it grouped products of these types have the shape that the kernel gives. Sizes that no kernel takes fail when they run."""
    rule, make_result = _RULE(), _RESULT()
    if rule is None or make_result is None or not is_tested():
        return nullcontext()

    def shape_of(a: Any, b: Any, scale_a: Any, scale_b: Any, offs: Any = None, *rest: Any, **options: Any) -> Any:
        other = [*rest, *(value for name, value in options.items() if name != "use_fast_accum")]
        if scale_a is None and a.dtype in _TYPES and a.dtype == b.dtype and not any(x is not None and x is not False for x in other):
            return make_result(a, b, offs, None)
        return rule(a, b, scale_a, scale_b, offs, *rest, **options)

    return patch_torch(_NEED, Patch(_RULES(), "_meta_grouped_mm_common", shape_of))
