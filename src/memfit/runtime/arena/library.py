"""The compiled half of planned arenas: built from arena.cpp on first use, kept in the cache folder, called through ctypes."""

from __future__ import annotations

import ctypes
import glob
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from memfit.core.errors import Unsupported

Ints = npt.NDArray[np.int64]
_SOURCES = tuple(Path(__file__).parent / name for name in ("arena.cpp", "arena_device.hpp"))
_ID, _PLACE = ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)
_PROTOTYPES: dict[str, tuple[Any, ...]] = {  # result, arguments
    "memfit_alloc": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p),
    "memfit_free": (None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p),
    "memfit_record_stream": (None, ctypes.c_void_p, ctypes.c_void_p),
    "memfit_set_fraction": (None, ctypes.c_double, ctypes.c_int),
    "memfit_empty": (None,),
    "memfit_new_program": (_ID, ctypes.c_int),
    "memfit_drop_program": (None, _ID),
    "memfit_commit": (ctypes.c_int, _ID, _ID, _PLACE, _PLACE, _ID),
    "memfit_tidy": (None, _ID),
    "memfit_new_run": (_ID, _ID),
    "memfit_enter": (_ID, _ID),
    "memfit_finish_run": (None, _ID),
    "memfit_drop_run": (None, _ID),
    "memfit_verdict": (None, _ID, _PLACE),
    "memfit_read_run": (_ID, _ID, _ID, _PLACE),
    "memfit_stats": (None, ctypes.c_int, _PLACE),
    "memfit_reset_peaks": (None, ctypes.c_int),
    "memfit_bind": (ctypes.c_int, ctypes.c_char_p),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a run kept to its plan. `lingering`: blocks it left in the arena."""

    made: int
    skipped: int
    strays: int
    collisions: int
    lingering: int

    @property
    def is_clean(self) -> bool:
        return not (self.skipped or self.strays or self.collisions or self.lingering)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaStats:
    """Bytes of one device as the allocator counts them; `reserved_bytes` is what it has taken from the driver."""

    allocated_bytes: int
    allocated_peak_bytes: int
    reserved_bytes: int
    reserved_peak_bytes: int
    arena_bytes: int
    num_allocations: int
    num_in_arena: int


class Library:
    """arena.cpp, loaded. One per process for CUDA, since the books are the process's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.functions = ctypes.CDLL(str(path))
        for name, (result, *arguments) in _PROTOTYPES.items():
            function = getattr(self.functions, name)
            function.restype, function.argtypes = result, arguments

    def address(self, name: str) -> int:
        found = ctypes.cast(getattr(self.functions, name), ctypes.c_void_p).value
        assert found is not None
        return found

    def commit(self, program: int, sizes: Ints, offsets: Ints, height_bytes: int) -> bool:
        return bool(self.functions.memfit_commit(program, len(sizes), _pointer(sizes), _pointer(offsets), height_bytes))

    def verdict(self, run: int) -> Verdict:
        out = np.zeros(5, np.int64)
        self.functions.memfit_verdict(run, _pointer(out))
        made, skipped, strays, collisions, lingering = out.tolist()
        return Verdict(made=made, skipped=skipped, strays=strays, collisions=collisions, lingering=lingering)

    def read_run(self, run: int, count: int) -> tuple[Ints, int]:
        """Rows of (size, start, stop), stop -1 for what is still alive; and the moment the run ended."""
        out = np.zeros((count, 3), np.int64)
        end = self.functions.memfit_read_run(run, count, _pointer(out))
        return out, int(end)

    def stats(self, device: int) -> ArenaStats:
        out = np.zeros(7, np.int64)
        self.functions.memfit_stats(device, _pointer(out))
        return ArenaStats(**dict(zip(ArenaStats.__slots__, out.tolist(), strict=True)))


def _pointer(values: Ints) -> Any:
    assert values.dtype == np.int64
    assert values.flags.c_contiguous
    return values.ctypes.data_as(_PLACE)


def build(folder: Path, *, malloc: bool = False) -> Path:
    """The shared library for this source and this torch, compiled unless it is there already. `malloc`: the heap as device."""
    text = b"".join(p.read_bytes() for p in _SOURCES)
    mark = hashlib.sha256(text + f"{torch.__version__} {malloc}".encode()).hexdigest()[:16]
    target = folder / f"arena-{mark}.so"
    if _is_whole(target):
        return target
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise Unsupported("planned arenas need a C++ compiler once, and none was found: install g++, or train without use_planned_arena().")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / target.name
        command = [compiler, "-std=c++20", "-O2", "-shared", "-fPIC", str(_SOURCES[0]), "-o", str(made), *_flags(malloc)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Unsupported(
                f"arena.cpp could not be compiled by {compiler}: {done.stderr.strip()[-300:]}. Train without use_planned_arena()."
            )
        with open(made, "rb") as written:
            os.fsync(written.fileno())
        _digest_file(target).write_text(hashlib.sha256(made.read_bytes()).hexdigest())
        made.replace(target)
    return target


def _is_whole(target: Path) -> bool:
    """A library of which a part is missing ends the process that loads it."""
    try:
        return hashlib.sha256(target.read_bytes()).hexdigest() == _digest_file(target).read_text()
    except (OSError, ValueError):
        return False


def _digest_file(target: Path) -> Path:
    return target.with_suffix(".sha256")


def _flags(malloc: bool) -> list[str]:
    if malloc:
        return ["-DMEMFIT_MALLOC", "-ldl"]
    from torch.utils.cpp_extension import include_paths, library_paths

    libraries = library_paths()
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [
        abi,
        *(f"-I{p}" for p in include_paths()),
        *(f"-L{p}" for p in libraries),
        *(f"-Wl,-rpath,{p}" for p in libraries),
        "-lc10",
        "-ldl",
    ]


def load_malloc(folder: Path) -> Library:
    """The books over the heap: what tests drive."""
    library = Library(build(folder, malloc=True))
    library.functions.memfit_limit_heap.argtypes, library.functions.memfit_limit_heap.restype = [_ID], None
    return library


def load_cuda(folder: Path) -> Library:
    """The books over CUDA, bound to the runtime that torch itself has loaded."""
    library = Library(build(folder))
    major = (torch.version.cuda or "0").split(".")[0]
    name = f"libcudart.so.{major}"
    beside = Path(torch.__file__).parents[1] / "nvidia"
    candidates = [name, *sorted(glob.glob(str(beside / "*" / "lib" / name))), "libcudart.so"]
    if not any(library.functions.memfit_bind(c.encode()) for c in candidates):
        raise Unsupported(f"{name} was not found beside torch {torch.__version__}: planned arenas need torch's own CUDA runtime library.")
    return library
