"""Gives Array its arithmetic."""

from __future__ import annotations

from memfit.tape import executor as execute
from memfit.tape.array import OPERATORS
from memfit.tape.ops import broadcast, elementwise, linear, reduce, views

OPERATORS.update(
    add=elementwise.add,
    subtract=elementwise.subtract,
    multiply=elementwise.multiply,
    divide=elementwise.divide,
    negate=elementwise.negate,
    power=elementwise.power,
    matmul=linear.matmul,
    sum=broadcast.sum_over,
    mean=reduce.mean_over,
    reshape=broadcast.reshape,
    transpose=views.transpose,
    get_item=views.get_item,
    numpy=lambda array: execute.evaluate([array])[0],
)
