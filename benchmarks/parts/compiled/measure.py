"""The compiled engine on a GPU against torch.compile, its memory budget and checkpointing: time, memory and cold start.

GPU time comes in short slices, so every row is written as soon as it is measured and a second run goes on where the first
stopped. Several models are worked on side by side, because compiling is the processor's work; whatever is timed holds a lock
on the GPU. `--alone` models come first and by themselves: their cold starts can be compared. Budgets are shares of
torch.compile's own peak, and the peaks of the peers measured before that no other peer beats: memfit has to be faster there.
`compiled.py table` makes the table and the plot.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.gpu import device_name
from benchmarks.lib.measuring import records
from benchmarks.lib.results import ROOT, commit
from benchmarks.models.peers import PEERS
from benchmarks.parts.compiled.torch_rows import STARTS, rows

CORE = "compile|compile + checkpoint,eager,eager + checkpoint|memfit"
COLD = ("compile", "compile + checkpoint", "memfit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(PEERS))
    parser.add_argument(
        "--parts",
        default=CORE,
        help='also "budget 0.5" (activation_memory_budget), "adamw", "start", "start again", "reserved", "reserved caching", "gradients" (dropout off); '
        '"|" separates processes, "MODEL,MODEL: PARTS" is for these alone',
    )
    parser.add_argument("--alone", default="", help="models measured first, one at a time")
    parser.add_argument("--fractions", default="1,0.75,0.5,0.4,0.33,0.25", help="of torch.compile's peak")
    parser.add_argument("--scale", type=float, default=1.0, help="batch size factor (small on a CPU)")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines are appended here")
    parser.add_argument("--plan-seconds", type=float, default=6.0)
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing new after this long")
    parser.add_argument("--jobs", type=int, default=3, help="more disturb each other's steps: a job is a process and its compilers")
    parser.add_argument("--keep", type=Path, help="folder for graphs and measured costs, to plan elsewhere")
    parser.add_argument("--offload", action="store_true", help="every budget also with values that wait on the host")
    parser.add_argument("--replay", action="store_true", help="torch.compile and every budget of memfit also replayed from a CUDA graph")
    parser.add_argument("--warm", action="store_true", help='"memfit" finds the caches that "start" left')
    parser.add_argument("--once", action="store_true", help='"memfit" starts cold only: half a minute less for a large model')
    parser.add_argument("--here", action="store_true", help="measure in this process (used by the driver)")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    (measure if args.here else drive)(args)


# -- the driver ------------------------------------------------------------------------------------------------------


def drive(args: argparse.Namespace) -> None:
    """A process per model and group of parts."""
    end = time.perf_counter() + args.seconds
    groups = args.parts.split("|")
    queue = [(model, parts) for group in groups for model, parts in _tasks_of(group, args.models)]
    alone = [task for task in queue if task[0] in args.alone.split(",") and task[1] == queue[0][1]]
    with tempfile.NamedTemporaryFile() as own:
        lock = os.environ.get("MEMFIT_GPU_LOCK", own.name)  # shared with whatever else is measured meanwhile
        for task in alone:
            _start(args, *task, lock, threads=16).wait()
        running: list[subprocess.Popen[bytes]] = []
        for task in (t for t in queue if t not in alone):
            while len(running := [p for p in running if p.poll() is None]) >= args.jobs:
                _step_back_compilers()
                time.sleep(0.5)
            if time.perf_counter() < end:
                running.append(_start(args, *task, lock, threads=max(2, (os.cpu_count() or 2) // args.jobs)))
        while any(p.poll() is None for p in running):
            _step_back_compilers()
            time.sleep(0.5)


def _step_back_compilers() -> None:
    """Processes that compile yield to those that run steps, whoever started them."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes()
            if b"compile_worker" in line or b"multiprocessing" in line:
                os.setpriority(os.PRIO_PROCESS, int(folder.name), 15)


def _tasks_of(group: str, models: str) -> list[tuple[str, str]]:
    chosen, _, parts = group.rpartition(":")
    return [(model, parts.strip()) for model in (chosen or models).split(",")]


def _start(args: argparse.Namespace, model: str, parts: str, lock: str, *, threads: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "compiled.py"),
        "measure",
        "--here",
        "--models",
        model,
        "--parts",
        parts,
        "--output",
        str(args.output),
    ]
    command += ["--fractions", args.fractions, "--scale", str(args.scale), "--plan-seconds", str(args.plan_seconds)]
    command += ["--keep", str(args.keep)] if args.keep else []
    command += ["--offload"] if args.offload else []
    command += ["--replay"] if args.replay else []
    command += ["--warm"] if args.warm else []
    command += ["--once"] if args.once else []
    return subprocess.Popen(command, env={**os.environ, "MEMFIT_GPU_LOCK": lock, "TORCHINDUCTOR_COMPILE_THREADS": str(threads)})


# -- one process -----------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> None:
    if args.parts == "reserved" and torch.cuda.is_available():
        import memfit

        memfit.use_planned_arena()
    peer, device = PEERS[args.models], "cuda" if torch.cuda.is_available() else "cpu"
    about = {"model": peer.name, "device": device_name(device), "torch": torch.__version__, "commit": commit(), "scale": args.scale}
    torch.compile(lambda x: x + 1)(torch.ones(1, device=device))  # what the first compilation of a process pays is nobody's
    done = {(r["model"], r["part"]) for r in records(args.output)}
    for part in args.parts.split(","):
        if (peer.name, part) in done:
            continue
        try:
            with _caches(part, peer.name, warm=args.warm):
                for row in rows(peer, part, device, args):
                    _write(args.output, about | {"part": part} | row)
        except Exception as error:
            failure = {"what": part, "error": f"{type(error).__name__}: {error}"[:500], "trace": traceback.format_exc()[-2500:]}
            _write(args.output, about | {"part": part} | failure)


@contextlib.contextmanager
def _caches(part: str, model: str, *, warm: bool) -> Iterator[None]:
    """Fresh for what is timed cold; between the two starts, and for what shall be warm, they stay."""
    from torch._inductor import utils

    from memfit.core.cache_folder import use_cache_folder

    shared = part in STARTS or (warm and part == "memfit")
    if part in COLD and not shared:
        fresh = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache
        with fresh(), tempfile.TemporaryDirectory() as folder:
            use_cache_folder(Path(folder))
            yield
    elif shared:
        kept = Path(tempfile.gettempdir()) / f"memfit-starts-{model}"
        if part == STARTS[0]:
            shutil.rmtree(kept, ignore_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(kept / "inductor")
        os.environ["TRITON_CACHE_DIR"] = str(kept / "triton")
        use_cache_folder(kept)
        yield
    else:
        yield


def _write(path: Path, record: dict[str, Any]) -> None:
    print(json.dumps({k: v for k, v in record.items() if k not in ("device", "torch", "commit", "scale")}), flush=True)
    with path.open("a") as file:
        file.write(json.dumps(record | {"time": time.time()}) + "\n")
