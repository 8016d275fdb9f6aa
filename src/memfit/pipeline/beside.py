"""What a budget has to hold besides the step: bytes held outside it, and what the allocator wastes."""

from __future__ import annotations

import torch

from memfit.capture.captured import Captured
from memfit.capture.inputs import Call
from memfit.capture.lower.optimizer_bytes import optimizer_bytes
from memfit.capture.lower.storages import granularity_of, round_up
from memfit.core.budget import Budget
from memfit.core.errors import InfeasibleBudget, NoPlanFound
from memfit.core.units import format_bytes
from memfit.pipeline.task import Task
from memfit.torch_private.tensors import storage_key

_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")


def count_held_elsewhere(task: Task, call: Call, captured: Captured, known_bytes: int = 0) -> int:
    """Device bytes this process holds outside the step: library workspaces that stay (cuBLAS), whatever else the caller keeps. On the CPU
    only those that are known, since nobody counts there what a process has allocated."""
    if captured.device.type != "cuda":
        return known_bytes + count_others(task, captured.device)
    if any(op.name.startswith(_PRODUCTS) for op in captured.graph.ops):  # with the first of them cuBLAS takes its workspace, and keeps it
        torch.mm(*(torch.ones(16, 16, device=captured.device) for _ in range(2)))
    state = [t for entry in task.optimizer.state.values() for t in entry.values()] if task.optimizer is not None else []
    gradients = [p.grad for p in task.model.parameters() if p.requires_grad]  # those left on frozen ones are no part of the step
    ours = (*task.model.parameters(), *task.model.buffers(), *call.tensors, *gradients, *state)
    storages = {storage_key(t): t.untyped_storage().nbytes() for t in ours if isinstance(t, torch.Tensor) and t.is_cuda}
    rounded = sum(round_up(size, granularity_of(captured.device)) for size in storages.values())
    return max(0, torch.cuda.memory_allocated(captured.device) - rounded) + count_others(task, captured.device)


def count_others(task: Task, device: torch.device) -> int:
    """What other models hold between their steps: parameters, buffers, gradients of what they train, optimizer state. On CUDA less what of
    it is there already, since the allocator knows of that. What is part of this step too, or left on it, is counted there."""
    own = {storage_key(t) for t in (*task.model.parameters(), *task.model.buffers())}
    total, there = 0, 0
    for other in task.others:
        trained = other.trained
        held = {storage_key(t): t for t in (*other.model.parameters(), *other.model.buffers()) if storage_key(t) not in own}
        own |= held.keys()
        gradients = [p for p in trained if storage_key(p) in held or not (p.requires_grad or p.grad is not None)]
        state = optimizer_bytes(other.optimizer).state_bytes if other.optimizer is not None else 0
        total += sum(t.untyped_storage().nbytes() for t in held.values()) + sum(p.nbytes for p in gradients) + state
        found = [v for entry in other.optimizer.state.values() for v in entry.values()] if other.optimizer is not None else []
        present = (*held.values(), *(p.grad for p in gradients), *found)
        there += sum(t.untyped_storage().nbytes() for t in present if isinstance(t, torch.Tensor) and t.device == device)
    return max(0, total - there) if device.type == "cuda" else total


def count_slack(captured: Captured, peak_bytes: int) -> int:
    """Bytes to leave on CUDA: blocks of the caching allocator carry up to 1 MiB each that nobody asked for, differently every step.

    Measured on the H200 over eight models: 0.0 to 0.5 % of the peak. A larger miss is left to the closed loop.
    """
    return max(2 * 2**20, peak_bytes // 200) if captured.device.type == "cuda" else 0


def count_all(refusal: InfeasibleBudget, given: Budget, beside_bytes: int) -> InfeasibleBudget:
    """A refusal in the user's own terms: what a budget has to hold besides the step is counted in the least one to ask for."""
    if not beside_bytes or given.device_bytes is None or refusal.minimum_bytes is None:
        return refusal
    least_bytes = refusal.minimum_bytes + beside_bytes
    besides = f"{format_bytes(beside_bytes)} of the budget of {format_bytes(given.device_bytes)} are held outside the step or left to the allocator"
    return InfeasibleBudget(
        f"{besides}; {refusal} Counting both, the budget must be at least {least_bytes} bytes.", minimum_bytes=least_bytes
    )


def name_doctor(refusal: InfeasibleBudget | NoPlanFound) -> InfeasibleBudget | NoPlanFound:
    """A refusal with one more next move: who says what holds the minimum and what lowers it."""
    message = f"{refusal} `memfit doctor`, or memfit.doctor(...), shows what holds the minimum and what lowers it."
    if isinstance(refusal, InfeasibleBudget):
        return InfeasibleBudget(message, minimum_bytes=refusal.minimum_bytes)
    return NoPlanFound(message)
