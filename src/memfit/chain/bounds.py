"""What no schedule of a chain can beat, whatever its slots."""

from __future__ import annotations

from memfit.chain.problem import Chain
from memfit.chain.revolve import num_forwards


def lower_bound(chain: Chain) -> float:
    """Every forward and backward once, a read before each backward but the first, one write; Revolve's count if one level is free."""
    num = chain.num_steps
    usable = [x for x in chain.levels if x.slots != 0]
    forwards = num
    copies = 0.0
    if usable and num:
        copies = min(x.write_cost for x in usable) + num * min(x.read_cost for x in usable)
        if len(usable) == 1:
            forwards = num_forwards(num + 1, num if usable[0].slots is None else usable[0].slots)
    return forwards * chain.forward_cost + (num + 1) * chain.backward_cost + copies
