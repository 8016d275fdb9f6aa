"""Inductor, the compiler of regions: everything private to it is in this folder.

Inductor         the compiler, as `passes.regions.compiler.Compiler` asks for it
compiled_start   around making a step ready: starts and ends helper processes
compile_pieces   compile the pieces of a step together
"""

from memfit.compilers.inductor.compile_all import compile_pieces
from memfit.compilers.inductor.compiler import Inductor
from memfit.compilers.inductor.starts import compiled_start

__all__ = ["Inductor", "compile_pieces", "compiled_start"]
