"""The model the user gets back: the same class, parameters, buffers and names, with a planned forward.

The fitted module shares the plain model's `__dict__`, so everything that looks at a module sees the original: state_dict
keys, train() and eval(), `model.config`, isinstance; so does its class's name, which tools write into files. Only being
called is another thing:

    fitted(x) ── stepper ── traces or runs the plain model: its hooks, its `forward`, also one that a tool put on the instance
                                └── which may lead back to the fitted model's own `forward`: the plain class's, from here on
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from torch import nn

# At run time too, not only for the type checker: HuggingFace evaluates the annotations of its subclasses.
from memfit.core.plan import Plan
from memfit.runtime.closed_loop import Stepper
from memfit.runtime.guarded import Guarded
from memfit.runtime.plain_calls import are_plain, made_plain
from memfit.runtime.report import Report


class FittedModule(nn.Module):
    """What `memfit.fit` adds to a model."""

    _memfit: Guarded | Stepper

    @property
    def plan(self) -> Plan:
        """The plan of the latest shape: schedule, timeline, planner, budget."""
        return self._memfit.plan

    def report(self) -> Report:
        """What was planned and what was measured, as text (`str`) or data (`.as_data()`)."""
        return self._memfit.report()

    def __copy__(self) -> Any:
        """A copy is a plain model, a shallow one too: a plan belongs to one set of parameters."""
        return copy.copy(self._memfit.model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy (an EMA of the weights, say) is a plain model."""
        return copy.deepcopy(self._memfit.model, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a fitted model cannot be pickled: save fitted.state_dict() and fit again, with plan= to skip planning.")


def fit_module(model: nn.Module, stepper: Guarded | Stepper) -> FittedModule:
    """A twin of `model` that runs the stepper when it is called, with the plain forward's signature for tools that inspect it."""
    kind = type(model)

    @functools.wraps(kind.forward)
    def forward(self: FittedModule, *args: Any, **kwargs: Any) -> Any:
        if are_plain():  # a forward on the instance was made from this one, as accelerate does
            return kind.forward(self._memfit.model, *args, **kwargs)
        with made_plain():
            return self._memfit.step(args, kwargs)

    def call(self: FittedModule, *args: Any, **kwargs: Any) -> Any:
        if are_plain():
            return self._memfit.model(*args, **kwargs)
        with made_plain():
            return self._memfit.step(args, kwargs)

    body = {"_memfit": stepper, "forward": forward, "__call__": call, "__doc__": kind.__doc__}
    body |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    twin: Any = type(kind.__name__, (FittedModule, kind), body)
    fitted: FittedModule = twin.__new__(twin)
    object.__setattr__(fitted, "__dict__", model.__dict__)
    return fitted
