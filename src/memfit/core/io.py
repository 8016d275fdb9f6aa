"""Graphs, costs, schedules, plans and outcomes as versioned JSON. A file from a stranger is data: it is read, checked and
refused in one line, never executed.

    {"format": "memfit.graph", "version": 1, "storages": [...], "tensors": [...], "ops": [...], ...}

Each `_read_*` names every field it wants; anything else is refused. The dataclasses check what the fields mean.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit.core.budget import Budget
from memfit.core.costs import Costs, Level
from memfit.core.errors import BadInput
from memfit.core.files import MAX_FILE_BYTES, check_target, read_text, write_text
from memfit.core.graph import Graph, Kind, Op, Storage, Tensor, Variant
from memfit.core.json_fields import WIDE, Fields
from memfit.core.outcome import Outcome, Status
from memfit.core.plan import Layout, Plan, Timeline
from memfit.core.schedule import Compute, Free, Offload, Reload, Schedule, Step

VERSION = 1
__all__ = ["MAX_FILE_BYTES", "VERSION", "Artifact", "check_target", "dumps", "load", "loads", "read_text", "save", "write_text"]

Artifact = Graph | Costs | Schedule | Plan | Outcome


def dumps(artifact: Artifact) -> str:
    """The JSON text of an artifact; equal artifacts give equal texts."""
    name, write, _ = _format_of(type(artifact))
    data = {"format": f"memfit.{name}", "version": VERSION, **write(artifact)}
    try:
        return json.dumps(data, separators=(",", ":"), allow_nan=False, default=operator.index)  # numpy's integers too
    except (TypeError, ValueError) as error:
        raise BadInput(f"this {name} cannot be written as JSON ({error}): use whole numbers and finite floats.") from None


def loads(text: str | bytes, expected: type[Artifact] | None = None, *, source: str = "input") -> Artifact:
    """An artifact from JSON text. Raises BadInput with one line for anything that is not a valid one."""
    data = _parse_json(text, source)
    if not isinstance(data, dict) or not isinstance(data.get("format"), str):
        raise BadInput(f'{source}: not a memfit file: a JSON object with "format": "memfit.<kind>" is expected.')
    for kind, (name, _, read) in _FORMATS.items():
        if data["format"] == f"memfit.{name}":
            if expected is not None and kind is not expected:
                raise BadInput(f"{source}: holds a {name}, but a {_format_of(expected)[0]} is expected.")
            _check_version(data, source)
            fields = {k: v for k, v in data.items() if k not in ("format", "version")}
            return read(Fields(fields, f"{source}: {name}"))
    raise BadInput(
        f"{source}: unknown format {data['format'][:60]!r}: known are {', '.join('memfit.' + n for n, _, _ in _FORMATS.values())}."
    )


def load(path: str | Path, expected: type[Artifact] | None = None) -> Artifact:
    """Read a file; see `loads`."""
    return loads(read_text(path), expected, source=str(path))


def save(artifact: Artifact, path: str | Path, *, force: bool = False) -> None:
    """Write a file whole or not at all; an existing one is kept unless `force`."""
    write_text(dumps(artifact) + "\n", path, force=force)


def _parse_json(text: str | bytes, source: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise BadInput(f"{source}: nested too deeply to be a memfit file.") from None
    except UnicodeDecodeError:
        raise BadInput(f"{source}: not UTF-8 text.") from None
    except ValueError as error:
        raise BadInput(f"{source}: not valid JSON ({str(error)[:120]}).") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number memfit accepts")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) != len({key for key, _ in pairs}):
        raise ValueError("a key appears twice in one object")
    return dict(pairs)


def _check_version(data: dict[str, Any], source: str) -> None:
    version = data.get("version")
    if type(version) is not int or version != VERSION:
        raise BadInput(
            f"{source}: format version {ascii(version)[:20]} is not the version {VERSION} this memfit reads; write the file again."
        )


# -- graph ---------------------------------------------------------------------------------------------------------


def _write_graph(graph: Graph) -> dict[str, Any]:
    return {
        "storages": [[s.size_bytes, str(s.kind), s.name] for s in graph.storages],
        "tensors": [[t.storage, t.name] for t in graph.tensors],
        "ops": [_write_op(op) for op in graph.ops],
        "sources": graph.sources,
        "results": graph.results,
        "digest": graph.digest,
    }


def _write_op(op: Op) -> dict[str, Any]:
    data: dict[str, Any] = {"name": op.name, "inputs": op.inputs, "outputs": op.outputs}
    if not op.replayable:
        data["replayable"] = False
    if op.seeded:
        data["seeded"] = True
    if op.inplace_of:
        data["inplace_of"] = op.inplace_of
    if op.variants:
        data["variants"] = [{"name": v.name, "inputs": v.inputs, "outputs": v.outputs, "inplace_of": v.inplace_of} for v in op.variants]
    if op.where:
        data["where"] = op.where
    return data


def _read_graph(fields: Fields) -> Graph:
    storages = tuple(
        Storage(id=i, size_bytes=row.integer(0), kind=Kind(row.choice(1, tuple(Kind))), name=row.text(2))
        for i, row in enumerate(fields.rows("storages", 3))
    )
    tensors = tuple(Tensor(id=i, storage=row.integer(0), name=row.text(1)) for i, row in enumerate(fields.rows("tensors", 2)))
    ops = tuple(_read_op(i, item) for i, item in enumerate(fields.objects("ops")))
    sources, results, digest = fields.integers("sources"), fields.integers("results"), fields.text("digest", "")
    fields.done()
    return Graph(ops=ops, tensors=tensors, storages=storages, sources=sources, results=results, digest=digest)


def _read_op(position: int, item: Fields) -> Op:
    op = Op(
        id=position,
        name=item.text("name"),
        inputs=item.integers("inputs"),
        outputs=item.integers("outputs"),
        replayable=item.boolean("replayable", True),
        seeded=item.boolean("seeded", False),
        inplace_of=item.pairs("inplace_of", ()),
        variants=tuple(_read_variant(v) for v in item.objects("variants", ())),
        where=item.text("where", ""),
    )
    item.done()
    return op


def _read_variant(item: Fields) -> Variant:
    variant = Variant(
        name=item.text("name"),
        inputs=item.integers("inputs"),
        outputs=item.integers("outputs"),
        inplace_of=item.pairs("inplace_of", ()),
    )
    item.done()
    return variant


# -- costs ---------------------------------------------------------------------------------------------------------


def _write_costs(costs: Costs) -> dict[str, Any]:
    return {
        "op_time_ns": costs.op_time_ns,
        "workspace_bytes": costs.workspace_bytes,
        "variant_time_ns": costs.variant_time_ns,
        "variant_workspace_bytes": costs.variant_workspace_bytes,
        "levels": [[x.write_bytes_per_s, x.read_bytes_per_s, x.write_latency_ns, x.read_latency_ns] for x in costs.levels],
        "device": costs.device,
        "graph_digest": costs.graph_digest,
    }


def _read_costs(fields: Fields) -> Costs:
    levels = tuple(
        Level(write_bytes_per_s=r.number(0), read_bytes_per_s=r.number(1), write_latency_ns=r.integer(2), read_latency_ns=r.integer(3))
        for r in fields.rows("levels", 4)
    )
    costs = Costs(
        op_time_ns=fields.integers("op_time_ns"),
        workspace_bytes=fields.integers("workspace_bytes"),
        variant_time_ns=fields.integer_lists("variant_time_ns"),
        variant_workspace_bytes=fields.integer_lists("variant_workspace_bytes"),
        levels=levels,
        device=fields.text("device", ""),
        graph_digest=fields.text("graph_digest", ""),
    )
    fields.done()
    return costs


# -- schedule, plan, outcome ---------------------------------------------------------------------------------------

_STEP_CODES: dict[str, Callable[[int, int], Step]] = {"compute": Compute, "free": Free, "offload": Offload, "reload": Reload}


def _write_step(step: Step) -> list[Any]:
    if isinstance(step, Compute):
        return ["compute", step.op, step.variant]
    return [type(step).__name__.lower(), step.storage, step.level]


def _write_schedule(schedule: Schedule) -> dict[str, Any]:
    return {"steps": [_write_step(s) for s in schedule.steps]}


def _read_schedule(fields: Fields) -> Schedule:
    codes = tuple(_STEP_CODES)
    steps = tuple(
        _STEP_CODES[row.choice(0, codes)](row.integer(1, minimum=0), row.integer(2, minimum=0)) for row in fields.rows("steps", 3)
    )
    fields.done()
    return Schedule(steps=steps)


def _write_timeline(timeline: Timeline) -> dict[str, Any]:
    return {
        "bytes_at_step": timeline.bytes_at_step,
        "peak_bytes": timeline.peak_bytes,
        "peak_step": timeline.peak_step,
        "time_ns": timeline.time_ns,
        "serial_time_ns": timeline.serial_time_ns,
        "compute_time_ns": timeline.compute_time_ns,
        "bytes_by_kind": dict(zip(map(str, timeline.kinds), timeline.bytes_by_kind, strict=True)),
        "level_peak_bytes": timeline.level_peak_bytes,
    }


def _read_timeline(fields: Fields) -> Timeline:
    by_kind = fields.object("bytes_by_kind")
    kinds = tuple(Kind(by_kind.checked_choice(k, tuple(Kind))) for k in by_kind.names())
    timeline = Timeline(
        bytes_at_step=fields.integers("bytes_at_step", minimum=0, maximum=WIDE),
        peak_bytes=fields.integer("peak_bytes", minimum=0, maximum=WIDE),
        peak_step=fields.integer("peak_step", minimum=-1),
        time_ns=fields.integer("time_ns", minimum=0, maximum=WIDE),
        serial_time_ns=fields.integer("serial_time_ns", minimum=0, maximum=WIDE),
        compute_time_ns=fields.integer("compute_time_ns", minimum=0, maximum=WIDE),
        kinds=kinds,
        bytes_by_kind=tuple(by_kind.integers(str(kind), minimum=0, maximum=WIDE) for kind in kinds),
        level_peak_bytes=fields.integers("level_peak_bytes", minimum=0, maximum=WIDE),
    )
    fields.done()
    num_steps = len(timeline.bytes_at_step)
    if timeline.peak_step >= num_steps:
        raise BadInput(f"the timeline has its peak at step {timeline.peak_step} of {num_steps}: the file was changed; plan again.")
    for kind, row in zip(kinds, timeline.bytes_by_kind, strict=True):
        if len(row) != num_steps:
            raise BadInput(f"the timeline has {len(row)} entries for {kind} and {num_steps} steps: the file was changed; plan again.")
    return timeline


def _write_plan(plan: Plan) -> dict[str, Any]:
    return {
        "schedule": _write_schedule(plan.schedule),
        "timeline": _write_timeline(plan.timeline),
        "planner": plan.planner,
        "graph_digest": plan.graph_digest,
        "budget": list(plan.budget.limits),
        "layout": plan.layout and {"offsets": plan.layout.offsets, "height_bytes": plan.layout.height_bytes},
    }


def _read_plan(fields: Fields) -> Plan:
    limits = fields.optional_integers("budget", minimum_length=3)
    plan = Plan(
        schedule=_read_schedule(fields.object("schedule")),
        timeline=_read_timeline(fields.object("timeline")),
        planner=fields.text("planner"),
        graph_digest=fields.text("graph_digest"),
        budget=Budget(device_bytes=limits[0], host_bytes=limits[1], disk_bytes=limits[2], deeper_bytes=limits[3:]),
        layout=None if fields.is_null("layout") else _read_layout(fields.object("layout")),
    )
    fields.done()
    if len(plan.timeline.bytes_at_step) != len(plan.schedule.steps):
        raise BadInput(
            f"the plan has {len(plan.schedule.steps)} steps and a timeline of {len(plan.timeline.bytes_at_step)}: "
            "the file was changed; plan again."
        )
    return plan


def _read_layout(fields: Fields) -> Layout:
    layout = Layout(offsets=fields.integers("offsets", minimum=0), height_bytes=fields.integer("height_bytes", minimum=0))
    fields.done()
    return layout


def _write_outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "status": str(outcome.status),
        "plan": outcome.plan and _write_plan(outcome.plan),
        "lower_bound_ns": outcome.lower_bound_ns,
        "lower_bound_bytes": outcome.lower_bound_bytes,
        "gap_fraction": outcome.gap_fraction,
        "seconds": outcome.seconds,
        "reason": outcome.reason,
    }


def _read_outcome(fields: Fields) -> Outcome:
    outcome = Outcome(
        status=Status(fields.choice("status", tuple(Status))),
        plan=None if fields.is_null("plan") else _read_plan(fields.object("plan")),
        lower_bound_ns=fields.integer("lower_bound_ns", minimum=0, maximum=WIDE),
        lower_bound_bytes=fields.integer("lower_bound_bytes", minimum=0, maximum=WIDE),
        gap_fraction=None if fields.is_null("gap_fraction") else fields.number("gap_fraction"),
        seconds=fields.number("seconds"),
        reason=fields.text("reason"),
    )
    fields.done()
    return outcome


_FORMATS: dict[type[Artifact], tuple[str, Callable[[Any], dict[str, Any]], Callable[[Fields], Artifact]]] = {
    Graph: ("graph", _write_graph, _read_graph),
    Costs: ("costs", _write_costs, _read_costs),
    Schedule: ("schedule", _write_schedule, _read_schedule),
    Plan: ("plan", _write_plan, _read_plan),
    Outcome: ("outcome", _write_outcome, _read_outcome),
}


def _format_of(kind: type[Artifact]) -> tuple[str, Callable[[Any], dict[str, Any]], Callable[[Fields], Artifact]]:
    return _FORMATS[kind]
