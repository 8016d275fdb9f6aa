"""The walk through the house: which rooms one call goes through, in which order, and to which of them it comes back.

python scripts/walk.py                      eager fit, compiled fit, pack, checkpoint, schedule
python scripts/walk.py fit --src PATH       one of them, with the memfit that lies in PATH
python scripts/walk.py --by                 also by which function each room was entered

A room is the first folder below src/memfit. An entry is a call from code of one room into a function of another, as `sys.setprofile` sees it.
A return is an entry of a room that was entered before and left since. The rules say what is no entry:

- The same room again, with no other room entered in between, is one entry: the walk shows it once, with the number of calls.
- `core`, `torch_private`, `lazy` and every `__init__` belong to nobody, and so does `report/progress.py`, which only listens: what is called
  through them counts as called by who called them.
- The pipeline and the doors (`api`, `backend`, `cli`; `task`, `choice` and `prepare` before the pipeline had a folder) string the rooms
  together. So pipeline > capture > pipeline > passes are two entries, of `capture` and of `passes`, and the pipeline is none.
- A callback is no entry. A room can call a room that waits for it, further up the stack with no pipeline in between, only through something
  that it was handed. What the callback then calls is an entry like any other.
- Reading a value is no entry: properties (with what they call in their own room), methods whose name begins and ends with two underscores,
  and the class itself being made.
- While a module is imported nothing counts. Other threads and processes do what they are given, and are not walked.
- Tables of numbers and settings that all rooms hand round are values: `capture/captured.py` (the step itself), `capture/inputs.py`, and `jit`,
  which calls compiled functions.
- A measured op is called by `profile`, and what an op runs lies in `kernels`: that is an entry, once for all ops measured in a row.

The walk of `fit` comes to several forms of the step, and each one is made, costed and perhaps planned. `FORMS` names the functions that make
one, and the first step is a part of its own (bars in the walk): "within a form" is the most returns that any such part has, which should be none.

At a small budget the number of forms tried, and with it the walk, depends on measured times; `compiled-roomy` has one form only.

Counted twice: the line, which is what the pipeline and the doors themselves enter, and the walk, which is everybody's entries. The line is what
a reader follows through the house; what a room uses of others meanwhile (a pass asks a kernel for its name) is in the walk only.
"""

from __future__ import annotations

import argparse
import dis
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
NOBODY = frozenset({"core", "torch_private", "lazy", "jit", "report/progress", "capture/captured", "capture/inputs"})
STRINGING = frozenset({"pipeline", "api", "backend", "cli", "task", "choice", "prepare"})
FORMS = frozenset({"Forms.usual", "Forms._make"})


@dataclass(slots=True)
class Visit:
    """One stay in a room: how many calls came to it in a row, and the first of them."""

    room: str
    function: str
    calls: int = 1
    form: int = 0


@dataclass(slots=True)
class Walk:
    """What was entered, in order."""

    visits: list[Visit] = field(default_factory=list)

    @property
    def num_entries(self) -> int:
        """A stay that goes on from one form into the next is one."""
        return sum(
            1 for before, visit in zip([None, *self.visits], self.visits, strict=False) if before is None or before.room != visit.room
        )

    @property
    def num_returns(self) -> int:
        return self.num_entries - len({v.room for v in self.visits})

    @property
    def num_returns_within_a_form(self) -> int:
        """The most that any form has."""
        forms = {v.form for v in self.visits}
        return max((self._returns_of(form) for form in forms), default=0)

    def _returns_of(self, form: int) -> int:
        own = [v.room for v in self.visits if v.form == form]
        return len(own) - len(set(own))

    def enter(self, room: str, function: str, form: int) -> None:
        last = self.visits[-1] if self.visits else None
        if last is not None and last.room == room and last.form == form:
            last.calls += 1
        else:
            self.visits.append(Visit(room, function, form=form))

    def __str__(self) -> str:
        parts: list[str] = []
        for before, visit in zip([None, *self.visits], self.visits, strict=False):
            if before is not None:
                parts.append(" | " if before.form != visit.form else " > ")
            parts.append(visit.room + (f" x{visit.calls}" if visit.calls > 1 else ""))
        return "".join(parts)


class Walker:
    """Follows the calls of one thread. `package` is the folder whose first level are the rooms."""

    def __init__(self, package: Path, *, forms: frozenset[str] = FORMS) -> None:
        self.line, self.walk = Walk(), Walk()
        self._package = str(package.resolve()) + os.sep
        self._forms = forms
        self._rooms: dict[CodeType, str] = {}
        self._read: set[CodeType] = set()  # properties
        self._stack: list[str] = []
        self._imports = 0
        self._form = 0

    def begin_form(self) -> None:
        self._form += 1

    @contextmanager
    def following(self) -> Iterator[Walk]:
        sys.setprofile(self._see)
        try:
            yield self.walk
        finally:
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._call(frame)
        elif event == "return" and self._stack:
            self._stack.pop()
            self._imports -= frame.f_code.co_name == "<module>"

    def _call(self, frame: FrameType) -> None:
        code, here = frame.f_code, self._stack[-1] if self._stack else ""
        self._imports += code.co_name == "<module>"
        if code not in self._rooms:
            self._rooms[code] = "" if is_special(code) else self._room_of(code)
            if is_property(frame):
                self._read.add(code)
        room = "" if self._imports else self._rooms[code]
        if room:
            self._form += code.co_qualname in self._forms
            if room != here and code not in self._read:
                self._change(room, code)
        self._stack.append(room or here)

    def _change(self, room: str, code: CodeType) -> None:
        if room in STRINGING or self._waits(room):
            return
        function = f"{Path(code.co_filename).stem}.{code.co_qualname}"
        self.walk.enter(room, function, self._form)
        if not self._stack or self._stack[-1] in {"", *STRINGING}:
            self.line.enter(room, function, self._form)

    def _waits(self, room: str) -> bool:
        """Whether the room has called, through others, who now calls it, and the pipeline not in between."""
        for waiting in reversed(self._stack):
            if waiting == room or waiting in STRINGING:
                return waiting == room
        return False

    def _room_of(self, code: CodeType) -> str:
        """Of a piece of code; empty for what belongs to no room: it counts as its caller's."""
        if not code.co_filename.startswith(self._package):
            return ""
        place = code.co_filename.removeprefix(self._package).removesuffix(".py").replace(os.sep, "/")
        room = place.split("/")[0]
        return "" if room in NOBODY or place in NOBODY or place.endswith("__init__") else room


def is_special(code: CodeType) -> bool:
    return code.co_name.startswith("__") and code.co_name.endswith("__") and code.co_name not in ("__call__", "__next__")


def is_property(frame: FrameType) -> bool:
    caller = frame.f_back
    return caller is not None and dis.opname[caller.f_code.co_code[caller.f_lasti]] == "LOAD_ATTR"


# -- what is walked ------------------------------------------------------------------------------------------------------


def _training() -> tuple[Any, dict[str, Any]]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for num_channels in (3, 16, 16, 16, 16, 16):
        layers += [nn.Conv2d(num_channels, 16, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4096, 10))
    return model, {
        "example_inputs": torch.randn(32, 3, 16, 16),
        "example_targets": torch.randint(0, 10, (32,)),
        "loss_fn": nn.functional.cross_entropy,
        "time_limit_s": 5,
    }


def fit(folder: Path, engine: str = "eager", budget: str = "3.6MiB") -> Iterator[None]:
    """From `memfit.fit` to the end of the first step, backward included, at a budget at which ops run twice."""
    del folder
    import memfit

    model, options = _training()

    yield
    fitted = memfit.fit(model, budget=budget, engine=engine, **options)
    yield
    fitted(options["example_inputs"], options["example_targets"]).backward()


def compiled(folder: Path) -> Iterator[None]:
    return fit(folder, "inductor")


def compiled_in_plenty(folder: Path) -> Iterator[None]:
    """At a budget that holds everything: one form only. How many forms a small budget takes depends on the clock."""
    return fit(folder, "inductor", "64MiB")


def command(*arguments: str) -> Callable[[Path], Iterator[None]]:
    """A command of the shell, from parsing to the last line."""

    def run(folder: Path) -> Iterator[None]:
        from memfit.cli import main

        write_inputs(folder)
        os.chdir(folder)
        sys.argv = ["memfit", *arguments]
        yield
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise

    return run


def write_inputs(folder: Path) -> None:
    """A packing that greedy does not close, and a diamond of tasks."""
    buffers = [(0, 2, 1), (1, 4, 1), (2, 5, 2), (3, 7, 1), (5, 8, 1), (6, 9, 1), (4, 6, 1), (7, 9, 2)]
    rows = "".join(f"{k},{start},{end},{size}\n" for k, (start, end, size) in enumerate(buffers))
    (folder / "buffers.csv").write_text("id,lower,upper,size\n" + rows)
    tasks = [{"id": name, "output_bytes": size} for name, size in (("load", 9), ("left", 4), ("right", 5), ("join", 1))]
    edges = [["load", "left"], ["load", "right"], ["left", "join"], ["right", "join"]]
    (folder / "tasks.json").write_text(json.dumps({"tasks": tasks, "edges": edges}))


WALKS: dict[str, Callable[[Path], Iterator[None]]] = {
    "fit": fit,
    "compiled": compiled,
    "compiled-roomy": compiled_in_plenty,
    "pack": command("pack", "buffers.csv"),
    "checkpoint": command("checkpoint", "--steps", "100", "--slots", "10"),
    "schedule": command("schedule", "tasks.json"),
}


def walk_here(name: str, source: Path, forms: frozenset[str]) -> dict[str, Any]:
    """In this process, which has imported nothing of memfit yet. Up to its first `yield` a walk prepares what it needs."""
    sys.path.insert(0, str(source))
    walker = Walker(source / "memfit", forms=forms)
    with tempfile.TemporaryDirectory() as folder:
        parts = WALKS[name](Path(folder))
        next(parts)
        with walker.following() as walk:
            for _ in parts:
                walker.begin_form()
    found = {"line": walker.line, "walk": walk}
    return {
        how: {
            "entries": one.num_entries,
            "returns": one.num_returns,
            "returns within a form": one.num_returns_within_a_form,
            "rooms": str(one),
            "by": [f"{v.room}: {v.function}" for v in one.visits],
        }
        for how, one in found.items()
    }


def walk_apart(name: str, source: Path, forms: Sequence[str] = tuple(sorted(FORMS))) -> dict[str, Any]:
    """In a process of its own with empty caches, so that nothing is known from before."""
    with tempfile.TemporaryDirectory() as home:
        settings = {"HOME": home, "TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor", "PYTHONPATH": str(source), "NO_COLOR": "1"}
        if "NUMBA_CACHE_DIR" not in os.environ:
            settings["NUMBA_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / "memfit-walk-numba")
        command_line = [
            sys.executable,
            __file__,
            name,
            "--here",
            "--src",
            str(source),
            "--forms",
            *forms,
        ]
        done = subprocess.run(command_line, capture_output=True, text=True, env={**os.environ, **settings})
    if done.returncode:
        raise SystemExit(f"the walk of {name} in {source} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("walks", nargs="*", help=f"of {', '.join(WALKS)}; all without")
    parser.add_argument("--src", type=Path, default=ROOT / "src", help="the folder that holds memfit")
    parser.add_argument("--forms", nargs="*", default=sorted(FORMS), help="functions that make a form of the step")
    parser.add_argument("--by", action="store_true", help="also by which function each room was entered")
    parser.add_argument("--here", action="store_true", help="one walk in this process, as one line of JSON")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(walk_here(options.walks[0], options.src.resolve(), frozenset(options.forms))))
        return
    for name in options.walks or WALKS:
        found = walk_apart(name, options.src.resolve(), options.forms)
        for how, one in found.items():
            print(f"{name}, {how}: {one['entries']} entries, {one['returns']} returns, {one['returns within a form']} within a form")
            print(f"  {one['rooms']}")
            if options.by:
                print("".join(f"    {line}\n" for line in one["by"]), end="")


if __name__ == "__main__":
    main()
