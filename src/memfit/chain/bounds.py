"""What no schedule of a chain can beat, whatever its slots."""

from __future__ import annotations

from memfit.chain.problem import Chain
from memfit.chain.revolve import num_forwards


def lower_bound(chain: Chain) -> float:
    """Revolve's forwards in all slots together, every backward once, a read before each but the first, and one write."""
    num = chain.num_steps
    usable = [x for x in chain.levels if x.slots != 0]
    if not usable or not num:
        return num * chain.forward_cost + (num + 1) * chain.backward_cost
    slots = sum(num if x.slots is None else x.slots for x in usable)
    copies = min(x.write_cost for x in usable) + num * min(x.read_cost for x in usable)
    return num_forwards(num + 1, slots) * chain.forward_cost + (num + 1) * chain.backward_cost + copies
