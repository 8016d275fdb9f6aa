"""`memfit checkpoint`: the optimal checkpointing schedule of a chain, its cost and its picture."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import typer

from memfit.cli.console import FORCE_OPTION, JSON_OPTION, OUTPUT_OPTION, print_json, print_table, show_status, wrote
from memfit.core.errors import BadInput, NoPlanFound
from memfit.core.io import check_target, save, write_text
from memfit.core.units import parse_bytes, simplify_number

JUDGE_UP_TO = 500_000  # steps; the judge takes some 3 microseconds for each

MAX_STEPS = 20_000_000


def command(
    steps: int = typer.Option(..., "--steps", help="l: forwards F_0 … F_{l-1} and backwards B_l … B_0."),
    slots: str | None = typer.Option(None, "--slots", help='States each level can keep, e.g. "5,20"; "inf" is no limit.'),
    capacity: str | None = typer.Option(None, "--capacity", help='Bytes each level can keep instead of slots, e.g. "512MiB,20GiB".'),
    state: str = typer.Option("1", "--state", help="Bytes of one state, with --capacity."),
    forward_cost: float = typer.Option(1.0, "--forward-cost", help="Cost of one forward step (seconds, or any unit)."),
    backward_cost: float = typer.Option(1.0, "--backward-cost", help="Cost of one backward step."),
    write: str | None = typer.Option(None, "--write", help="Cost of writing a state, one value per level; 0 unless given."),
    read: str | None = typer.Option(None, "--read", help="Cost of reading a state, one value per level; 0 unless given."),
    algorithm: str = typer.Option(
        "auto",
        "--algorithm",
        help="auto (the optimal one), h-revolve, revolve, disk-revolve, periodic, online, sqrt, store-all or recompute-all.",
    ),
    judge: bool | None = typer.Option(None, "--judge/--no-judge", help=f"Replay in the judge; by default up to {JUDGE_UP_TO} steps."),
    as_json: bool = JSON_OPTION,
    output: Path | None = OUTPUT_OPTION,
    force: bool = FORCE_OPTION,
) -> None:
    """Plan when to keep a state and where, and when to recompute it. x_0 starts in the working buffer only.

    -o FILE.png draws the space-time diagram, -o FILE.json saves the judged plan.
    """
    from memfit.chain import PLANNERS, cost_of

    if algorithm not in ("auto", *PLANNERS):
        raise BadInput(f"algorithm {algorithm!r} is not known: choose auto or one of {', '.join(PLANNERS)}.")
    if output is not None:
        check_target(output, force=force)
    if steps > MAX_STEPS:
        raise NoPlanFound(f"{steps} steps make a schedule of more moves than can be counted here: give at most {MAX_STEPS}.")
    chain = _chain(steps, slots, capacity, state, forward_cost, backward_cost, write, read)
    with show_status(f"planning {steps} steps"):
        begin = time.perf_counter()
        plan = _plan(chain, algorithm)
        if plan.status == "INFEASIBLE":
            if as_json:
                print_json(_list_fields(plan, None, None, seconds=time.perf_counter() - begin))
            plan.require()
        counts = plan.counts()
        seconds = time.perf_counter() - begin
        cost = cost_of(chain, counts)
        num_core_steps = counts.num_forward + 2 * counts.num_backward + 2 * sum(counts.writes) + sum(counts.reads)
        wanted = num_core_steps <= JUDGE_UP_TO if judge is None else judge
        judged = _judge(plan, cost) if wanted else False
    data = _list_fields(plan, counts, cost, seconds=seconds, judged=judged)
    if as_json:
        print_json(data)
    else:
        _print(plan, data)
    if output is not None:
        _save(plan, output, force)


def _plan(chain: Any, algorithm: str) -> Any:
    from memfit.chain import PLANNERS

    if algorithm == "auto":
        levels = chain.levels
        is_free = len(levels) == 1 and not levels[0].write_cost and not levels[0].read_cost
        algorithm = "revolve" if is_free else "h-revolve"
    return PLANNERS[algorithm](chain)


def _judge(plan: Any, cost: float) -> bool:
    """Replay in the core's judge, on a clock fine enough that its whole nanoseconds cannot hide a difference."""
    timeline = plan.judge()
    assert abs(timeline.serial_time_ns - cost * 1e9) <= max(1.0, 1e-9 * cost * 1e9) + len(timeline.bytes_at_step), (
        "judge and count disagree"
    )
    return True


def _chain(
    steps: int, slots: str | None, capacity: str | None, state: str, forward: float, backward: float, write: str | None, read: str | None
) -> Any:
    from memfit.chain import Chain, StorageLevel

    if (slots is None) == (capacity is None):
        raise typer.BadParameter("give either --slots or --capacity, one value per level, e.g. --slots 5,20")
    state_bytes = parse_bytes(state, what="state")
    if slots is not None:
        places = [None if part in ("inf", "unlimited") else _number(part, "--slots", int) for part in _parts(slots)]
    else:
        limits = [None if part in ("inf", "unlimited") else part for part in _parts(capacity or "")]
        places = [StorageLevel.of_bytes(limit, state_bytes).slots for limit in limits]
    writes, reads = _costs(write, "--write", len(places)), _costs(read, "--read", len(places))
    levels = tuple(StorageLevel(slots=s, write_cost=w, read_cost=r) for s, w, r in zip(places, writes, reads, strict=True))
    return Chain(
        num_steps=steps,
        levels=levels,
        forward_cost=simplify_number(forward),
        backward_cost=simplify_number(backward),
        state_bytes=state_bytes,
        adjoint_bytes=state_bytes,
    )


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _number(text: str, option: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        example = "5,20" if kind is int else "0,2.5"
        raise typer.BadParameter(
            f"{text!r} is not a number: give one value per level, separated by commas, e.g. {example}", param_hint=option
        ) from None


def _costs(text: str | None, option: str, num_levels: int) -> list[float]:
    if text is None:
        return [0] * num_levels
    values = [simplify_number(_number(part, option, float)) for part in _parts(text)]
    if len(values) != num_levels:
        raise typer.BadParameter(f"{len(values)} costs for {num_levels} levels: give one value per level", param_hint=option)
    return values


def _list_fields(plan: Any, counts: Any, cost: float | None, *, seconds: float, judged: bool = False) -> dict[str, Any]:
    """For programs; `counts` and `cost` are None where there is no schedule."""
    steps, none = plan.chain.num_steps, [0] * len(plan.chain.levels)
    found = {} if counts is None else {"recompute_factor": counts.num_forward / steps if steps else 1.0, "judged": judged}
    return {
        "status": str(plan.status),
        "algorithm": plan.algorithm,
        "total_cost": cost,
        "lower_bound": plan.lower_bound if plan.status == "FEASIBLE" else cost,  # equal if optimal, but for the last bit of a float
        "num_forward": counts.num_forward if counts else 0,
        "num_backward": counts.num_backward if counts else 0,
        "writes": list(counts.writes) if counts else none,
        "reads": list(counts.reads) if counts else none,
        **found,
        "seconds": seconds,
        "reason": plan.reason,
    }


def _print(plan: Any, data: dict[str, Any]) -> None:
    from memfit.chain.spacetime import trace
    from memfit.report.spacetime import spacetime_text

    chain = plan.chain
    rows = [
        ("status", f"{data['status']} ({plan.algorithm}): {plan.reason}"),
        ("total cost", f"{data['total_cost']:,} (lower bound {data['lower_bound']:,})"),
        ("forwards", f"{data['num_forward']:,} for {chain.num_steps:,} steps: each runs {data['recompute_factor']:.3f} times on average"),
        ("backwards", f"{data['num_backward']:,}"),
    ]
    for k, level in enumerate(chain.levels):
        size = "unlimited" if level.slots is None else f"{level.slots:,}"
        rows.append(
            (
                f"level {k}",
                f"{size} slots, {data['writes'][k]:,} writes at {level.write_cost:g}, {data['reads'][k]:,} reads at {level.read_cost:g}",
            )
        )
    rows.append(
        ("seconds", f"{data['seconds']:.3f}, {'replayed by the judge' if data['judged'] else 'not replayed by the judge (--judge does)'}")
    )
    print_table(rows)
    if data["num_forward"] <= JUDGE_UP_TO:
        path = trace(plan)
        typer.echo(
            "\n"
            + spacetime_text(num_steps=path.num_steps, total_time=path.total_time, advances=path.advances, backs=path.backs, kept=path.kept)
        )


def _save(plan: Any, output: Path, force: bool) -> None:
    if output.suffix == ".json":
        save(plan.as_plan(), output, force=force)
        wrote(output)
    elif output.suffix == ".png":
        from memfit.chain.spacetime import trace
        from memfit.report.spacetime import spacetime_png

        path = trace(plan)
        title = f"{plan.algorithm}: {plan.chain.num_steps} steps, cost {plan.cost:g}, {plan.status}"
        picture = spacetime_png(
            num_steps=path.num_steps, total_time=path.total_time, advances=path.advances, backs=path.backs, kept=path.kept, title=title
        )
        write_text(picture, output, force=force)
        wrote(output, f"look at {output}")
    else:
        raise BadInput(f"{output} ends in {output.suffix!r}: give a .png for the picture or a .json for the plan.")
