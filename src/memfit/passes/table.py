"""Every rewrite of a step, for each engine, in the order in which they run.

    slots      always ─ forms: at most one of them in a form of the step ─ choices, offered to the planner ─ regions ─ after costs
    use        ALWAYS  whatever the user allows                 FORM         a form of the step, beside the others
               ALLOWED if variants are allowed                  IF_SLOW      a form, where the others have no plan or a slow one
               CHOICE  op by op, if variants are allowed        LAST_RESORT  a form, where nothing else has a plan

`pipeline/forms.py` makes the forms of a step from this table; the table in `docs/explanation/operator-variants.md` is this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from memfit.passes.fx.cudnn_batch_norm import CUDNN_BATCH_NORM_AS_EAGER
from memfit.passes.fx.fuse_counters import FUSE_COUNTERS
from memfit.passes.fx.max_pool_gradient import POOL_GRADIENT_GATHERED
from memfit.passes.fx.prepare_for_compiler import PREPARE_FOR_COMPILER
from memfit.passes.fx.relu_before_pool import RELU_BEFORE_POOL
from memfit.passes.fx.split_projections import SPLIT_PROJECTIONS
from memfit.passes.interface import Numbers, Pass
from memfit.passes.regions.regions import REGIONS
from memfit.passes.slicing.slice_blocks import slicing
from memfit.passes.step.chunked_loss import CHUNKED_LOSS
from memfit.passes.step.concat_gradients import CONCAT_GRADIENTS
from memfit.passes.step.fused_loss import FUSED_LOSS
from memfit.passes.step.losses_in_rows import LOSSES_IN_ROWS
from memfit.passes.variants.attention_kernels import ATTENTION_KERNELS
from memfit.passes.variants.attention_slices import ATTENTION_SLICES
from memfit.passes.variants.convolution_algorithms import CONVOLUTION_ALGORITHMS
from memfit.passes.variants.convolution_slices import CONVOLUTION_SLICES, COPY_SLICES, SLICED_CONVOLUTIONS
from memfit.passes.variants.fused_attention import FUSED_ATTENTION
from memfit.passes.variants.in_place import IN_PLACE
from memfit.passes.variants.mask_bits import DROPOUT_BITS, RELU_BITS
from memfit.passes.variants.narrow_indices import NARROW_INDICES
from memfit.passes.variants.norm_again import NORM_AGAIN


class Use(Enum):
    """When a pass runs."""

    ALWAYS = "always"
    ALLOWED = "always, with variants"
    CHOICE = "a choice"
    FORM = "a form"
    IF_SLOW = "a form, if slow"
    LAST_RESORT = "last resort"


@dataclass(frozen=True, slots=True)
class Slot:
    """A pass in its place."""

    rewrite: Pass[Any]
    use: Use


PIPELINE: dict[str, tuple[Slot, ...]] = {
    "eager": (
        Slot(CUDNN_BATCH_NORM_AS_EAGER, Use.ALWAYS),
        Slot(CHUNKED_LOSS, Use.FORM),
        Slot(LOSSES_IN_ROWS, Use.FORM),
        Slot(CONCAT_GRADIENTS, Use.FORM),
        Slot(slicing(8), Use.FORM),
        Slot(slicing(8, lean=True), Use.FORM),
        Slot(SLICED_CONVOLUTIONS, Use.FORM),
        Slot(FUSED_ATTENTION, Use.CHOICE),
        Slot(RELU_BITS, Use.CHOICE),
        Slot(DROPOUT_BITS, Use.CHOICE),
        Slot(NARROW_INDICES, Use.CHOICE),
        Slot(NORM_AGAIN, Use.CHOICE),
        Slot(CONVOLUTION_ALGORITHMS, Use.CHOICE),
        Slot(CONVOLUTION_SLICES, Use.CHOICE),
        Slot(ATTENTION_KERNELS, Use.CHOICE),
        Slot(ATTENTION_SLICES, Use.CHOICE),
        Slot(IN_PLACE, Use.CHOICE),
    ),
    "inductor": (
        Slot(PREPARE_FOR_COMPILER, Use.ALWAYS),
        Slot(POOL_GRADIENT_GATHERED, Use.ALWAYS),
        Slot(RELU_BEFORE_POOL, Use.ALWAYS),
        Slot(SPLIT_PROJECTIONS, Use.ALWAYS),
        Slot(FUSE_COUNTERS, Use.ALWAYS),
        Slot(FUSED_LOSS, Use.FORM),
        Slot(LOSSES_IN_ROWS, Use.FORM),
        Slot(slicing(4), Use.IF_SLOW),  # fewer images at a time run slower (VGG-16 on an H200: 2 % from four slices to eight)
        Slot(slicing(8), Use.IF_SLOW),
        Slot(slicing(8, lean=True), Use.LAST_RESORT),  # what is not kept inside a block is computed twice (7 % there)
        Slot(SLICED_CONVOLUTIONS, Use.LAST_RESORT),
        Slot(CONCAT_GRADIENTS, Use.ALLOWED),  # no more to compile, and no slower
        Slot(CONVOLUTION_ALGORITHMS, Use.CHOICE),
        Slot(COPY_SLICES, Use.CHOICE),
        Slot(ATTENTION_KERNELS, Use.CHOICE),
        Slot(REGIONS, Use.ALWAYS),
    ),
}

FIRST_FORMS: dict[str, tuple[tuple[str, frozenset[Numbers]], ...]] = {
    "eager": (
        ("as it is", frozenset()),
        ("with choices of the same bits", frozenset({Numbers.SAME_BITS})),
        ("with choices", frozenset(Numbers)),
    ),
    "inductor": (("in regions", frozenset(Numbers)),),
}
"""The forms that every step has: their names, and which choices they offer. Without choices bounds are tightest; a compiled step rounds
otherwise anyway. All forms after them offer every choice."""
