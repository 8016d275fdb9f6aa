"""The same step with its widest block run slice by slice of the batch: a pass Captured -> Captured.

    conv relu conv relu pool ─> p ─> ...          memfit.sliced_forward ─> p ─> ...
    ... <─ conv' relu' conv' relu' pool' <─ d p   d weights <─ memfit.sliced_backward <─ d p

Two ops replace the block's (`blocks` finds it, `sliced` runs it). The wide values inside never exist whole, so a step fits where no
order of whole ops does; the price is that they are made a second time, whatever the budget. That makes it an offer of its own and not
a variant: it is worth trying where the others have no plan, or a slow one. `lean` blocks keep nothing inside: for the least of budgets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from memfit.capture.captured import Captured, OpCall, Ref
from memfit.core.graph import Op
from memfit.passes.assemble import CycleError, Item, assemble, item_of
from memfit.passes.interface import Context, Level, Numbers, Pass
from memfit.passes.regions.compiler import Compiler
from memfit.passes.slicing.analysis import Batch, analyse
from memfit.passes.slicing.find_blocks import find_blocks
from memfit.passes.slicing.parts import Block, Part
from memfit.passes.slicing.sliced_call import Sliced

_NAMES = ("memfit.sliced_forward", "memfit.sliced_backward")
_NUM_SLICES = 8
_LEAST_SAMPLES = 8  # on a GPU: smaller slices do not fill it
_MOST_BLOCKS = 3


def slice_blocks(captured: Captured, compiler: Compiler | None, *, lean: bool = False, num_slices: int = _NUM_SLICES) -> Iterator[Captured]:
    """The step with a block in slices, in as many ways as there are blocks, the shortest first. Without a compiler ops run as they are."""
    batch = analyse(captured)
    if batch is None:
        return
    least = _LEAST_SAMPLES if captured.device.type == "cuda" else 1
    size = slice_size(batch.size, num_slices=num_slices, least=least)
    if size < batch.size:
        for block in islice(find_blocks(batch, lean=lean), _MOST_BLOCKS):
            try:
                yield replace_block(batch, block, size, compiler, _NAMES)
            except (
                CycleError,
                RuntimeError,
            ):  # something outside waits for the block and is waited for; a view that a slice does not allow
                continue


def slice_size(batch: int, *, num_slices: int, least: int) -> int:
    """Samples of a slice: one that divides the batch if there is one between half as many and as many as wanted, so that all are equal."""
    wanted = max(-(-batch // num_slices), min(least, -(-batch // 2)))
    dividing = (n for n in range(wanted, wanted // 2, -1) if batch % n == 0 and n >= min(least, wanted))
    return next(dividing, wanted)


def replace_block(batch: Batch, block: Block, size: int, compiler: Compiler | None, names: tuple[str, str]) -> Captured:
    """The step with two ops of these names in place of a block, which run it in slices of `size`."""
    captured = batch.captured
    items = [item_of(captured, op) for op in block.left]
    items.append(_item(batch, block.forward, names[0], size, compiler))
    if block.backward is not None:
        items.append(_item(batch, block.backward, names[1], size, compiler))
    return assemble(captured, items)


def _item(batch: Batch, part: Part, name: str, size: int, compiler: Compiler | None) -> Item:
    target = Sliced(batch, part, size, compiler)
    ops = batch.captured.graph.ops
    where = next((ops[op].where for op in part.ops if ops[op].where), "")
    op = Op(id=-1, name=f"{name} {target.digest}", inputs=part.inputs, outputs=part.outputs, where=where)
    call = OpCall(target=target, args=tuple(map(Ref, part.inputs)), outputs=part.outputs, unpack=True)
    return Item(op, [], call, part.ops[-1])


def slicing(num_slices: int, *, lean: bool = False) -> Pass[Captured]:
    """The pass for so many slices: the shortest block first."""

    def run(captured: Captured, context: Context) -> Iterable[Captured]:
        return slice_blocks(captured, context.compiler, num_slices=num_slices, lean=lean)

    return Pass(
        name=f"{'lean-' if lean else ''}blocks-in-{num_slices}-slices",
        where="the first ops up to a pool",
        becomes=f"{num_slices} slices of the batch, {'all' if lean else 'the wide ones'} again in backward",
        saves="their values, forward and backward",
        level=Level.STEP,
        numbers=Numbers.ROUNDS,
        run=run,
    )
