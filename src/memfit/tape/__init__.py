"""The embedded engine: a NumPy autograd whose memory is planned. Needs no torch.

Tape ── operations ── gradients ──> compile_program ──> Graph, Costs ──> any planner ──> Executor
"""

from memfit.tape.array import Array, Tape
from memfit.tape.executor import Executor, evaluate
from memfit.tape.gradient import gradients, hessian, hessian_vector
from memfit.tape.ops import operators as _operators
from memfit.tape.program import Program, compile_program

__all__ = ["Array", "Executor", "Program", "Tape", "compile_program", "evaluate", "gradients", "hessian", "hessian_vector"]

del _operators
