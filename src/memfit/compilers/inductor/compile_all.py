"""Compile the pieces of a step together: other processes write code and build kernels while this one goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from memfit.compilers.inductor.code_folder import code_folder
from memfit.compilers.inductor.code_writers import yield_written
from memfit.compilers.inductor.compiler import Inductor

Tell = Callable[[str, int, int], None]
"""Hears what is being done, and how many of how many are done."""


def compile_pieces(targets: Iterable[Any], tell: Tell, meanwhile: Iterator[None] = iter(())) -> None:
    """Compile the pieces that `targets` are made of, unless they are compiled already. A target without pieces has nothing to compile.

    `meanwhile` is other work, done bit by bit while helper processes are waited for.
    """
    pieces = (piece for target in targets for piece in getattr(target, "pieces", ()))
    todo = list({piece.digest: piece for piece in pieces if not piece.is_compiled}.values())
    if not todo:
        return
    code_folder()
    with Inductor().together() as settle:

        def work() -> None:
            settle()
            next(meanwhile, None)

        for position, piece in enumerate(yield_written(todo, work)):
            tell("compiling regions", position, len(todo))
            piece.compile()
        tell("building kernels", 0, 0)
        for _ in meanwhile:
            if settle():
                break
