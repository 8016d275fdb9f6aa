"""Seeds from the simple planners: repaired and rid of repeats, so that `auto` is never worse than they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.planning.baselines.chain_dp import chain_sequences
from memfit.planning.baselines.drop_cheap import DropCheap
from memfit.planning.baselines.greedy import Greedy
from memfit.planning.baselines.sqrt_segments import SqrtSegments, bytes_made, segments_sequence
from memfit.planning.cuts.just_in_time import turning_point
from memfit.planning.model.fast_judge import usage_of
from memfit.planning.search.state import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class SimplePlanners:
    """What the simple planners give, repaired."""

    name: str = "simple planners"

    def applies(self, search: Search) -> bool:
        return not search.is_large and not (search.began_without_variants and search.best is not None)

    def run(self, search: Search, seconds: float) -> None:
        for planner in (DropCheap(), SqrtSegments(), Greedy(time_share=search.settings.cuts.greedy_share)):
            if search.done or search.good_enough:
                break
            sequence = planner.sequence(search.problem)
            if sequence is not None:
                search.repair(sequence, search.makers, planner.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Checkpoint segments and plans for chains: near the floor they are closer to what is needed than one keep set at the peak."""

    name: str = "segments"

    def applies(self, search: Search) -> bool:
        return not search.began_without_variants and not search.done and not search.good_enough

    def run(self, search: Search, seconds: float) -> None:
        model = search.problem.model
        turn = turning_point(model, usage_of(model.arrays, np.array(model.agenda, np.int64)))
        weights = bytes_made(model, turn)
        for num_segments in search.settings.cuts.segments:
            if search.done or num_segments > turn:
                break
            search.repair(segments_sequence(model, turn, weights, num_segments), search.makers, f"{num_segments} segments")
        for share, sequence in chain_sequences(model, search.problem.limit_bytes):
            if search.done:
                break
            search.repair(sequence, search.makers, f"chain at {share:.0%}")
