"""Synthetic step graphs for planner benchmarks: random layered, NAS-like cells, DenseNet-like and transformer-like, any size, any seed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from memfit.capture.node_link import parse_node_link
from memfit.core.costs import Costs
from memfit.core.graph import Graph


def random_layered(num_nodes: int, seed: int) -> tuple[Graph, Costs]:
    """Layers of random width, edges mostly to the next layer and some further on: no forward or backward, no structure to use."""
    rng = Random(seed)
    width = max(2, round(num_nodes**0.45))
    layers: list[list[int]] = []
    while sum(map(len, layers)) < num_nodes - 1:
        start = sum(map(len, layers))
        layers.append(list(range(start, min(start + rng.randint(1, 2 * width), num_nodes - 1))))
    links = set()
    for k, layer in enumerate(layers):
        for v in layer:
            if k:
                links.add((rng.choice(layers[k - 1]), v))
            for _ in range(rng.choice((0, 1, 1, 2, 3))):
                if k:
                    back = min(k, 1 + int(rng.expovariate(0.7)))
                    links.add((rng.choice(layers[k - back]), v))
    read = {a for a, _ in links}
    for layer, following in zip(layers, [*layers[1:], [num_nodes - 1]], strict=True):
        links |= {(v, rng.choice(following)) for v in layer if v not in read}
    nodes = [{"id": v, "duration": rng.randint(0, 1000), "out_cost": rng.randint(100, 8000)} for v in range(num_nodes)]
    return parse_node_link({"nodes": nodes, "links": [{"source": a, "target": b} for a, b in sorted(links)]})


def _trained(inputs: list[list[int]], times: list[int], sizes: list[int]) -> tuple[Graph, Costs]:
    """A forward graph and its mirror: the backward of op v reads the gradients of v's readers, v's inputs and v's output."""
    n = len(inputs)
    readers: list[list[int]] = [[] for _ in range(n)]
    for v, ins in enumerate(inputs):
        for u in ins:
            readers[u].append(v)
    nodes = [{"id": v, "duration": times[v], "out_cost": sizes[v]} for v in range(n)]
    links = [(u, v) for v, ins in enumerate(inputs) for u in ins]
    for v in reversed(range(n)):
        nodes.append({"id": n + (n - 1 - v), "duration": 2 * times[v], "out_cost": sizes[v]})
        here = 2 * n - 1 - v
        links += [(2 * n - 1 - w, here) for w in readers[v]] + [(u, here) for u in inputs[v]] + [(v, here)]
    return parse_node_link({"nodes": nodes, "links": [{"source": a, "target": b} for a, b in links]})


def nas_cells(num_nodes: int, seed: int) -> tuple[Graph, Costs]:
    """Cells of seven ops wired at random to two earlier cells, widths changing: NASNet-like, with its mirror as backward."""
    rng = Random(seed)
    inputs: list[list[int]] = [[]]
    ends = [0, 0]
    scale = [4096]
    while len(inputs) < num_nodes // 2:
        size = max(64, int(scale[-1] * rng.choice((1, 1, 1, 0.5, 1.1))))
        inner: list[int] = []
        for _ in range(6):
            pool = ends[-2:] + inner
            inputs.append(sorted(set(rng.sample(pool, min(len(pool), rng.randint(1, 2))))))
            inner.append(len(inputs) - 1)
            scale.append(size)
        inputs.append(inner[-4:])
        scale.append(size)
        ends.append(len(inputs) - 1)
    return _trained(inputs, [max(1, s // rng.randint(2, 200)) for s in scale], scale)


def dense_net(num_nodes: int, seed: int) -> tuple[Graph, Costs]:
    """Blocks in which every layer reads up to twelve layers before it (through cheap concatenations): DenseNet-like."""
    rng = Random(seed)
    inputs: list[list[int]] = [[]]
    sizes, times = [1000], [10]
    block: list[int] = [0]
    while len(inputs) < num_nodes // 2:
        inputs.append(block[-12:])  # the concatenation: large and cheap
        sizes.append(sum(sizes[u] for u in block[-12:]))
        times.append(1 + sizes[-1] // 500)
        inputs.append([len(inputs) - 1])  # the convolution: small and dear
        sizes.append(rng.randint(200, 400))
        times.append(sizes[-2] // rng.randint(3, 8))
        block.append(len(inputs) - 1)
        if len(block) > 24:
            inputs.append([block[-1]])
            sizes.append(1000)
            times.append(50)
            block = [len(inputs) - 1]
    return _trained(inputs, times, sizes)


def transformer(num_nodes: int, seed: int) -> tuple[Graph, Costs]:
    """Identical blocks of twelve ops with residual connections: repetitive, the easy case."""
    del seed
    inputs: list[list[int]] = [[]]
    sizes, times = [1000], [5]
    shape = [(1, 1000, 4), (1, 3000, 60), (1, 4000, 30), (1, 4000, 10), (2, 1000, 30), (1, 1000, 20), (0, 1000, 4)]
    shape += [(1, 1000, 4), (1, 4000, 80), (1, 4000, 12), (1, 1000, 80), (0, 1000, 4)]
    while len(inputs) < num_nodes // 2:
        start, residual = len(inputs), len(inputs) - 1
        for kind, size, time in shape:
            last = len(inputs) - 1
            ins = [last, residual] if kind == 0 else [last] if kind == 1 else [last, start + 1]
            inputs.append(sorted(set(ins)))
            sizes.append(size)
            times.append(time)
            residual = len(inputs) - 1 if kind == 0 else residual
    return _trained(inputs, times, sizes)


FAMILIES: dict[str, Callable[[int, int], tuple[Graph, Costs]]] = {
    "random_layered": random_layered,
    "nas_cells": nas_cells,
    "dense_net": dense_net,
    "transformer": transformer,
}
