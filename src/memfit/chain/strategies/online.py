"""Online checkpointing: the number of steps is not known until the forward run ends (after Stumm and Walther, 2010).

    x0 ──> x1 ──> ... ──> x_i ──> ?        c slots; keep x_i, and give up which of those kept so far?

After every step the slots are those from which reversing *now* would be cheapest: x_i may take the place of any kept state,
and the choice with the least recomputation wins. Up to beta(c, 2) = (c + 1)(c + 2) / 2 steps this costs no more than Revolve
with the length known in advance (as Stumm and Walther's algorithm does there, and checked against it); beyond, a few percent.
Once the end is known each part between kept states is reversed by Revolve with the slots that are free by then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from memfit.chain.moves import Advance, Back, Drop, Move, Read, Write
from memfit.chain.plan import ChainPlan, refuse_no_slots, set_against_bound
from memfit.chain.problem import Chain
from memfit.chain.strategies.revolve import cost_in_memory, lower_bound, num_forwards, revolve_moves
from memfit.core.errors import BadInput


class OnlineCheckpoints:
    """Call `advance` for every forward step, then `finish` once; obey the moves they give."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise BadInput(f"{slots} slots: online checkpointing needs at least 1, for x_0.")
        self.slots = slots
        self.step = 0
        self.kept: list[int] = []

    def advance(self) -> list[Move]:
        """The moves for one more forward step from the state in the working buffer."""
        moves: list[Move] = []
        if len(self.kept) < self.slots:
            moves.append(Write(self.step, 0))
            self.kept.append(self.step)
        elif (victim := self._victim()) is not None:
            moves += [Drop(self.kept.pop(victim), 0), Write(self.step, 0)]
            self.kept.append(self.step)
        moves.append(Advance(self.step, self.step + 1))
        self.step += 1
        return moves

    def _victim(self) -> int | None:
        """Which kept state x_step should replace, if the chain ended after the next step; None to keep them all. O(slots)."""
        kept, end = self.kept, self.step + 1
        now = self._part_costs(kept, end, shift=0)
        best, victim = sum(now) + 1, None  # at equal cost x_step is kept: a new state is worth more later than an old neighbour
        fewer = [*self._part_costs(kept, self.step, shift=1), 0]  # the same parts with one slot more, x_step kept at the end
        before, after = 0, sum(fewer[2:])
        for k in range(1, len(kept)):  # parts before k - 1 stay, k - 1 and k become one, those after gain a slot
            stop = kept[k + 1] if k + 1 < len(kept) else self.step
            cost = before + num_forwards(stop - kept[k - 1], self.slots - k + 1) + after
            if cost < best:
                best, victim = cost, k
            before += now[k - 1]
            after -= fewer[k + 1]
        return victim

    def _part_costs(self, kept: list[int], end: int, *, shift: int) -> list[int]:
        """Forwards to reverse each part between kept states, the last up to `end`, with the slots free at that time."""
        stops = [*kept[1:], end][: len(kept)]
        return [
            num_forwards(stop - start, self.slots - i + shift) if self.slots - i + shift > 0 else 0
            for i, (start, stop) in enumerate(zip(kept, stops, strict=True))
        ]

    def finish(self) -> Iterator[Move]:
        """The backward sweep from the state in the working buffer, which is the last one."""
        yield Back(self.step)
        need = self.step - 1
        for held in range(len(self.kept) - 1, -1, -1):
            start = self.kept[held]
            yield Read(start, 0)
            yield from revolve_moves(need - start, self.slots - held, offset=start, stored=True)
            need = start - 1
        self.kept.clear()

    def num_forwards_if_ended(self) -> int:
        """All forward steps, those run so far included, if the chain ended here."""
        return self.step + sum(self._part_costs(self.kept, self.step, shift=0))


def online_moves(num_steps: int, slots: int) -> Iterator[Move]:
    """What an online run does when it turns out to have `num_steps` steps."""
    run = OnlineCheckpoints(max(slots, 1))
    for _ in range(num_steps):
        yield from run.advance()
    yield from run.finish()


def plan_online(chain: Chain) -> ChainPlan:
    """The schedule that online checkpointing arrives at for this length, with Revolve's optimum as the bound."""
    begin = time.perf_counter()
    if len(chain.levels) != 1 or chain.levels[0].write_cost or chain.levels[0].read_cost:
        raise BadInput("online checkpointing has one level that is free to write and read; use periodic checkpointing for a disk.")
    slots = chain.capacity(0)
    if slots < 1 and chain.num_steps:
        return refuse_no_slots("online", chain)
    run = OnlineCheckpoints(max(slots, 1))
    for _ in range(chain.num_steps):
        run.advance()
    cost = cost_in_memory(chain, run.num_forwards_if_ended())
    reason = "Decided step by step without knowing the length; the bound is Revolve's, which knows it."
    emit = partial(online_moves, chain.num_steps, slots)
    return set_against_bound("online", chain, cost, lower_bound(chain), emit, begin=begin, reason=reason)
