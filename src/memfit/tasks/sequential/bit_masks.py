"""A small graph as bit masks: a set of done tasks is one integer, which is what searches over closed sets want."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.tasks.graph import TaskGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """`frees[j]` lists (readers other than j as a mask, bytes) for the items that may go when j ends."""

    num_tasks: int
    before: tuple[int, ...]
    successors: tuple[tuple[int, ...], ...]
    needs: tuple[int, ...]  # working memory and outputs: what starting a task adds
    adds: tuple[int, ...]  # outputs that somebody still wants when it has ended
    frees: tuple[tuple[tuple[int, int], ...], ...]
    initial_bytes: int

    def after(self, done: int, held: int, task: int) -> int:
        """Bytes held once `task` has run on top of `done`."""
        held += self.adds[task]
        for others, size in self.frees[task]:
            if others & ~done == 0:
                held -= size
        return held


def make_masks(graph: TaskGraph) -> Masks:
    n = graph.num_tasks
    size, kept = graph.item_bytes.tolist(), graph.item_kept.tolist()
    everyone = [sum(1 << r for r in graph.readers.of(k)) for k in range(len(size))]
    return Masks(
        num_tasks=n,
        before=tuple(sum(1 << p for p in graph.predecessors.of(t)) for t in range(n)),
        successors=tuple(tuple(graph.successors.of(t)) for t in range(n)),
        needs=tuple((graph.memory_bytes + graph.output_bytes).tolist()),
        adds=tuple(sum(size[k] for k in graph.makes.of(t) if everyone[k] or kept[k]) for t in range(n)),
        frees=tuple(tuple((everyone[k] & ~(1 << t), size[k]) for k in graph.reads.of(t) if not kept[k] and size[k]) for t in range(n)),
        initial_bytes=graph.initial_bytes,
    )
