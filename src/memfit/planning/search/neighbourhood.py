"""Large neighbourhood search: break a plan a little, repair it with noise, drop its repeats, keep it if it is better.

    plan  ─┬─ delete some repeats in a stretch        ─┬─ repair with noise ─ polish ─ faster? ─> plan
           ├─ squeeze: repair for less than the budget ┤
           └─ move executions next to their readers   ─┘

While nothing fits, the same moves lower the bytes over the budget instead of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from memfit.jit.kernel import kernel
from memfit.planning.model.fast_judge import INVALID, drop_dead, measure
from memfit.planning.model.inplace_forms import Siblings, use_inplace
from memfit.planning.model.reduce import Arrays, Ints
from memfit.planning.search.drop_repeats import delete, find_repeats, polish
from memfit.planning.search.repair import Repairer

_NEVER = 2**62
_TOP = 16
_NOISES = (0.0, 0.0, 0.3, 1.0)
Standing = tuple[int, int]
"""(bytes over the limit summed over positions, time): smaller is better."""


@kernel
def find_move_target(a: Arrays, seq: Ints, p: int, later: bool) -> int:
    """How far the execution at p can move: to just before what first reads it, or to just after what it reads."""
    f = seq[p]
    step = 1 if later else -1
    q = p + step
    while 0 <= q < len(seq):
        g = seq[q]
        if g == f:
            break
        reader, writer = (g, f) if later else (f, g)
        blocked = False
        for k in range(a.in_ptr[reader], a.in_ptr[reader + 1]):
            for j in range(a.out_ptr[writer], a.out_ptr[writer + 1]):
                blocked |= a.in_idx[k] == a.out_idx[j]
        if blocked:
            break
        q += step
    return q - step


@dataclass(slots=True)
class Neighbourhood:
    """One search: its current plan, its best plan and its random numbers. Plans have plain forms; in-place ones are put in to judge them."""

    arrays: Arrays
    limit: int
    maker: Ints
    current: Ints
    siblings: Siblings
    seed: int = 0
    best: Ints = field(init=False)
    best_standing: Standing = field(init=False)
    standing: Standing = field(init=False)
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.current = self.best = self.siblings.plain[self.current]
        self.standing = self.best_standing = self.stand(self.current)

    def stand(self, seq: Ints) -> Standing:
        usage = np.empty(len(seq), np.int64)
        peak, time = measure(self.arrays, use_inplace(self.arrays, seq, self.siblings), usage)
        if peak == INVALID:
            return _NEVER, _NEVER
        return int(np.maximum(usage - self.limit, 0).sum()), int(time)

    def round(self, slack: float) -> bool:
        """One try. A plan up to `slack` worse than the best becomes the one the search goes on from; whether a new best was found."""
        trial = self._repair(self._break())
        standing = self.stand(trial)
        if standing[0] == 0:
            noise = float(self.random.choice(_NOISES))
            trial = polish(self.arrays, trial, self.limit, 3, noise=noise, random=self.random, inplace=self.siblings.known)
            standing = self.stand(trial)
        if self._is_acceptable(standing, slack):
            self.current, self.standing = trial, standing
        if standing < self.best_standing:
            self.best, self.best_standing = trial, standing
            return True
        return False

    def restart(self) -> None:
        self.current, self.standing = self.best, self.best_standing

    def _is_acceptable(self, standing: Standing, slack: float) -> bool:
        if self.best_standing[0] > 0:
            return standing[0] <= self.best_standing[0] * (1 + 10 * slack)
        return standing[0] == 0 and standing[1] <= self.best_standing[1] * (1 + slack)

    def _repair(self, seq: Ints) -> Ints:
        noise = float(self.random.uniform(0.0, 0.8))
        return drop_dead(self.arrays, self._make_repairer(self.limit, wide=32, noise=noise).run(seq, 60))

    def _make_repairer(self, limit: int, *, wide: int, noise: float) -> Repairer:
        inplace = self.siblings.known
        return Repairer(
            arrays=self.arrays, limit=limit, maker=self.maker, top=_TOP, wide=wide, noise=noise, random=self.random, inplace=inplace
        )

    def _break(self) -> Ints:
        choice = self.random.random()
        if choice < 0.5:
            return self._delete_some()
        if choice < 0.7:
            return self._squeeze(0.85, 0.995, 12)
        if choice < 0.8:
            return self._squeeze(0.6, 0.9, 60)
        return self._move_some()

    def _delete_some(self) -> Ints:
        seq = self.current
        again = find_repeats(self.arrays, seq)
        width = max(4, int(len(seq) * np.exp(self.random.uniform(-4.0, -0.5))))
        low = int(self.random.integers(0, max(len(seq) - width, 1)))
        inside = again[(again >= low) & (again < low + width)]
        chosen = self.random.permutation(inside)[: int(self.random.integers(1, 31))]
        return delete(self.arrays, seq, _NEVER, chosen)

    def _squeeze(self, low: float, high: float, most_steps: int) -> Ints:
        room = self.limit - self.arrays.base_bytes
        less = int(self.arrays.base_bytes + room * self.random.uniform(low, high))
        return self._make_repairer(less, wide=24, noise=0.6).run(self.current, int(self.random.integers(1, most_steps)))

    def _move_some(self) -> Ints:
        seq = self.current
        for _ in range(int(self.random.integers(1, 6))):
            p = int(self.random.integers(0, len(seq)))
            far = int(find_move_target(self.arrays, seq, p, bool(self.random.random() < 0.6)))
            to = far if self.random.random() < 0.5 else int(self.random.integers(min(p, far), max(p, far) + 1))
            if to == p:
                continue
            trial = np.insert(np.delete(seq, p), to, seq[p])
            if self.stand(trial)[0] < _NEVER:
                seq = trial
        return seq
