"""Packing look-alikes of minimalloc's instances at a capacity that is known to be feasible: which share is solved within how many seconds."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.results import ROOT, provenance, read_results, write_results


def measure(seeds: Sequence[int], time_limit_s: float, label: str) -> Iterator[dict[str, Any]]:
    from benchmarks.models.offset_instances import cut_anywhere, look_alikes
    from memfit.core.packing import check_packing
    from memfit.offsets import pack

    pack(*cut_anywhere(60, 1))  # loads compiled code before the clock starts
    for name, (buffers, capacity) in look_alikes(seeds):
        began_cpu = time.process_time()
        packing = pack(buffers, capacity, time_limit_s)
        check_packing(buffers, packing.offsets)
        yield {
            "version": label, "instance": name, "buffers": len(buffers), "load / capacity": f"{packing.lower_bound / capacity:.4f}",
            "height / capacity": f"{packing.height / capacity:.4f}", "solved": packing.height <= capacity, "seconds": round(packing.seconds, 2),
            "cpu_s": round(time.process_time() - began_cpu, 2), "machine load": f"{os.getloadavg()[0]:.1f}",
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 13, 15, 17, 19], help="odd ones from 11 on were never looked at")
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="the src folder of another checkout, to measure that one")
    parser.add_argument("--label", default="now")
    parser.add_argument("--rows", type=Path, help="write raw rows here instead of a results page")
    parser.add_argument("--with-rows", type=Path, nargs="*", default=[], help="rows written before, to stand beside these")
    options = parser.parse_args()
    sys.path.insert(0, str(options.source))  # before memfit is imported
    rows = [row for path in options.with_rows for row in read_results(path)[1]]
    for row in measure(options.seeds, options.time_limit, options.label):
        rows.append(row)
        print(" | ".join(str(v) for v in row.values()), file=sys.stderr, flush=True)
    if options.rows:
        options.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    run = provenance(options.seeds[0], ("numpy", "numba", "ortools"))
    columns = list(rows[0])
    write_results(
        "offsets_unseen", title="Packing instances nobody tuned for", text=TEXT, columns=columns, rows=rows, run=run, table="offsets_unseen"
    )


TEXT = """\
`pack` at the capacity from which each instance was cut, warm, with the time limit of 30 s that the published instances have. The machine's two
cores were shared with other work: `cpu_s` says how much processor time the answer took or, where it is not solved, was given (two cores of
one's own give 60 in 30 s). Five shapes per seed (`benchmarks/models/offset_instances.py`); odd seeds from 11 on were measured only, with one
exception: `anywhere 11` once took 16 s, which led to a change (gluing whole moments first) that was then made on even seeds from 20 to 60."""
