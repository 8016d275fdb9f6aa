"""Inductor, the compiler of regions: everything private to it is in this folder.

Inductor            the compiler, as `passes.regions.compiler.Compiler` asks for it
compile_pieces      compile the pieces of a step together
wake_writers        start helper processes early; helper_processes() ends them
mark_of, leave_mark which steps were compiled on this machine before
"""

from memfit.compilers.inductor.code_writers import wake_writers
from memfit.compilers.inductor.compile_all import compile_pieces, helper_processes
from memfit.compilers.inductor.compiler import Inductor
from memfit.compilers.inductor.start_marks import leave_mark, mark_of

__all__ = ["Inductor", "compile_pieces", "helper_processes", "leave_mark", "mark_of", "wake_writers"]
