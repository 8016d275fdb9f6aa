"""The numbers of `planner="auto"`: one frozen object, one group per part of the search.

`docs/explanation/experiments.md` says how they were found. *Points* are percent of the plain step's time, *shares* are fractions of one.
The shares of the time that stages get are in the table `AUTO` (`search/auto.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

Floats = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSettings:
    """When a gap is small, and what a search remembers."""

    early_points: float = 0.05  # a gap to stop at once, however little time has passed
    early_share: float = 0.1  # of the time limit: from then on the gap that the caller calls enough is enough
    closed_points: float = 0.005  # bound and plan have met for all that matters
    num_remembered: int = 8  # plans kept to search on from


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairSettings:
    """How a sequence over the budget is repaired (`search/state.py`)."""

    judged: int = 24  # insertions judged exactly in one step
    looked_at: int = 96  # idle values looked at in one step
    judged_large: int = 6  # the same two for large graphs: each look costs time in the length of the sequence
    looked_at_large: int = 10
    steps: int = 400  # insertions at most
    steps_large: int = 4000
    seconds: float = 20.0  # for one repair, and again for dropping repeats, at most
    seconds_large: float = 3.0
    share: float = 0.08  # of the time limit, for the same: another seed may be better than this one repaired at length
    share_left: float = 0.5  # of the time left
    polish_rounds: int = 6  # rounds of dropping repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class ReorderSettings:
    """Another order of the step, without repeats (`search/reorder.py`)."""

    movable_share: float = 0.8  # of the ops: where more can move, another order is the first thing to try
    helps_share: float = 0.1  # of what lies between peak and floor: an order that takes less away is not built on
    huge_forms: int = 30_000  # forms from which on nothing is annealed: a run would not get round to every op
    limit_step: float = 0.97  # a low limit is approached in steps: each is so much of the one before
    temperature: float = 0.03  # at first, as a share of the bytes over the limit
    lost: float = 1.5  # an order so many times worse than the best is given up


@dataclass(frozen=True, slots=True, kw_only=True)
class CutSettings:
    """Seeds and bounds from the LPs of single cuts (`cuts/planner.py`)."""

    shares: Floats = (1.0, 0.97, 0.93, 0.88, 0.8, 0.7, 0.6)  # of the budget, for which the first cut is solved
    more_shares: Floats = (1.0, 0.93)  # the same for further cuts
    close_points: float = 0.02  # a gap at which no further share is tried
    guesses: int = 4  # shares guessed from a seed's peak, for large graphs
    guess: float = 0.995  # of the share at which the seed would just fit
    least_step: float = 0.99  # the next guess is at most so much of the one before
    near_miss: float = 0.01  # of the budget: for large graphs only seeds so close are repaired
    greedy_share: float = 0.05  # of the time left, for the greedy planner as a seed: in a narrow budget it thrashes
    segments: tuple[int, ...] = (6, 10, 16, 24, 32, 48)  # numbers of checkpoint segments tried as seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactCutSettings:
    """Chains of cuts solved by branch and bound, and the LPs of longer ones (`cuts/refine.py`)."""

    looked_at: int = 8  # cuts whose LP is solved before one is chosen
    close_points: float = 0.05  # a gap so small that the first cut will do
    choose_share: float = 0.3  # of the stage's time, for choosing
    most_cuts: int = 20
    most_rows: int = 150_000  # of a program
    closed: float = 1e-4  # gap of a 0-1 program, in parts of the step's time, up to which it counts as solved
    near_points: float = 0.3  # a gap that is tried to be closed for longer
    near_share: float = 0.3  # of the time limit: for so long
    tiny: float = 5e-4  # of the budget: smaller storages are left open, which saves half of the solver's time
    rough: Floats = (0.01, 0.005)  # of the budget: below these a storage is small in the first, rough programs
    settle_tries: int = 2  # how often small storages are decided where large ones are
    settle_miss: float = 0.002  # for a plan over the budget by no more than this share
    settle_share: float = 0.5  # of the rough program's time
    small_miss: float = 0.1  # a seed over the budget by no more than this share is solved for again with that much less
    shares: Floats = (0.97, 0.93, 0.88, 0.8)  # of the budget, for which each chain's LP is rounded too
    spare_share: float = 0.2  # of the time, for solutions for less than the budget
    worthwhile: float = 1e-4  # a gain, in parts of the step's time, that counts as one
    patience: int = 3  # rounds without a gain after which exact chains end
    lp_patience: int = 5  # the same for LPs of longer chains
    idle_price: float = 3e-3  # share of all prices below which a cut says nothing that the others do not say


@dataclass(frozen=True, slots=True, kw_only=True)
class WideOpSettings:
    """Chains that begin with cuts at the ops that need most (`cuts/wide_ops.py`)."""

    gap_points: float = 1.0  # up to this gap cuts are best added one by one
    gain: float = 0.002  # how much more, in parts of the step's time, the LP of such a chain must say
    small: float = 0.002  # of the budget: of smaller storages a half may be kept
    wide: float = 0.4  # of the budget: an op that needs more by itself is a cut
    num_wide: int = 4  # such ops at most
    added: int = 2  # cuts added in a round
    most_cuts: int = 14
    gap: float = 1e-3  # of branch and bound
    round_share: float = 0.4  # of the time left, for one program
    lost: float = 1.02  # an answer so many times slower than the best plan ends the stage
    ample_s: float = 15.0  # time limit from which on exact chains follow as well


@dataclass(frozen=True, slots=True, kw_only=True)
class MilestoneSettings:
    """Links of long recomputations kept by force (`cuts/milestones.py`)."""

    spacings: tuple[int, ...] = (4, 2, 6, 3, 8, 12)  # every so many-th link is kept
    tries: int = 4  # budgets tried for one set of links
    guess: float = 0.995  # of the share at which the seed would just fit
    least_step: float = 0.99  # the next share is at most so much of the one before
    repair_s: float = 1.0  # for one seed


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSettings:
    """Exact programs over a part of a plan's storages (`cuts/window_milp.py`)."""

    num_cuts: int = 10  # at the plan's tightest moments
    most_cuts: int = 18
    width: int = 24  # storages free at once, at first
    least_width: int = 8
    wider: float = 1.25  # after a program that the solver finished
    narrower: float = 0.7  # after one that it did not finish
    round_s: float = 1.0  # for one program
    late_share: float = 0.8  # of that: a program that takes longer counts as not finished
    gap: float = 5e-4  # of branch and bound
    worthwhile: float = 2e-5  # a gain, in parts of the step's time, worth playing for
    patience: int = 8  # windows in a row without a better plan; those not finished count twice


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofSettings:
    """Proofs by going back from an op that must run (`cuts/infeasibility.py`)."""

    num_ops: int = 60  # gone back from: those that need most
    num_sets: int = 4000  # looked at for one op before it is given up


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantSettings:
    """The plan without operator variants as a seed (`search/without_variants.py`)."""

    shares: tuple[tuple[float, float], ...] = ((0.005, 0.2), (0.002, 0.5), (0.0, 0.85))
    """(how much lower, in parts of the step's time, the bound with variants is; share of the time for the plan without)."""
    first_share: float = 0.1  # of the time left, for a first plan without them
    ahead: float = 0.002  # a first plan with variants faster by this part of the step's time makes the other one needless
    mostly_share: float = 0.5  # a share from which on what comes after need not be thorough


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkSettings:
    """The neighbourhood search: break a plan, repair it, keep it if it is better (`search/improve.py`, `search/neighbourhood.py`)."""

    most_walks: int = 6
    at_once: int = 2  # threads
    least_walk_s: float = 0.7  # time that a walk must get to be begun
    round_share: float = 0.35  # of the time left, for one round over all walks
    miss_points: float = 5.0  # a gap from which on walks also begin at what did not fit
    slack: float = 0.012  # how much slower a plan may be and still be walked on from, at the beginning of a wave
    wave_s: float = 3.0  # in which that falls to nothing
    stale_s: float = 2.0  # without a gain after which a walk goes back to its best plan
    worthwhile: float = 1e-3  # an improvement of the plan's time that counts as one, for the caller's patience
    least_patience_s: float = 1.0
    tell_s: float = 0.5  # between two reports of progress
    look_s: float = 0.02  # between two looks at what walks have found
    hurried_points: float = 1.0  # with little time: a gap from which on a search comes before exact chains


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnealingSettings:
    """Runs of annealing (`annealing/runs.py`). Temperatures and prices are in times of an average op."""

    first_share: float = 0.55  # of the time, for runs from the step itself; the others begin at the best of those
    lengths: tuple[int, ...] = (1, 1, 2)  # of runs, as multiples of the shortest
    num_runs: float = 6  # of the shortest length fill the time of one thread
    hot: Floats = (3.0, 6.0, 2.0)  # temperatures at first, run after run
    cold: float = 0.03  # temperature in the end
    dear: float = 300.0  # price of an average storage over the limit in the end
    cheap: float = 3.0  # at first the price is the temperature divided by this
    give_up_share: float = 0.5  # of the time, after which annealing stops where only something else has a plan
    num_elite: int = 3  # best runs that later ones begin at
    trial_moves: int = 20_000  # of a first run, which says how many moves there is time for
    toll: float = 0.005  # of the limit: what a position over the limit counts extra
    num_runs_large: float = 1.5  # large graphs: fewer runs, from an order that holds less, cooler
    hot_large: Floats = (0.3, 1.0)
    cold_large: float = 0.1
    dear_large: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSettings:
    """Beams beside annealing (`annealing/beam.py`)."""

    kinds: tuple[tuple[int, float, bool], ...] = (
        *((64, 0.0, False), (32, 1.0, True), (64, 0.3, True)),
        *((64, 3.0, True), (128, 0.0, False), (128, 1.0, True)),
    )
    """One after the other: sets followed for each height of memory, the price of all memory in times of the step, whether deep."""
    begin_share: float = 0.3  # of the time in which beams for a first plan begin
    most_forms: int = 1000  # graphs up to which they do
    late_width: int = 256  # of the first beam that looks for a plan faster than the best one
    late_forms: int = 150  # graphs up to which there is one
    tie: float = 1e-4  # of the step's time: below it chance decides between two sets


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoSettings:
    """All of them. `large_forms`: from so many forms on steps that grow faster than the graph are left out."""

    large_forms: int = 3000
    stop: StopSettings = field(default_factory=StopSettings)
    repair: RepairSettings = field(default_factory=RepairSettings)
    reorder: ReorderSettings = field(default_factory=ReorderSettings)
    cuts: CutSettings = field(default_factory=CutSettings)
    exact: ExactCutSettings = field(default_factory=ExactCutSettings)
    wide: WideOpSettings = field(default_factory=WideOpSettings)
    milestones: MilestoneSettings = field(default_factory=MilestoneSettings)
    windows: WindowSettings = field(default_factory=WindowSettings)
    proof: ProofSettings = field(default_factory=ProofSettings)
    variants: VariantSettings = field(default_factory=VariantSettings)
    walks: WalkSettings = field(default_factory=WalkSettings)
    annealing: AnnealingSettings = field(default_factory=AnnealingSettings)
    beam: BeamSettings = field(default_factory=BeamSettings)
