"""Packing problems whose optimum is known, cut from a full rectangle; and how to write one to a CSV file.

┌────┬──────┐     cut a rectangle of time x address into pieces, forget the addresses: the pieces fit back into
│    ├───┬──┤     the rectangle, so its height is feasible, and where no piece was dropped it is the maximum load
├────┴───┼──┤     and so optimal
└────────┴──┘

`look_alikes` are what the exact search is measured on: in number, sizes, lives and fullness like minimalloc's published ones, of
five shapes, each from a seed. Seeds up to 10 were looked at while the search was written, odd ones from 11 on only measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from memfit.core.packing import Buffer


class Instance(NamedTuple):
    """`capacity` is known to be feasible."""

    buffers: tuple[Buffer, ...]
    capacity: int


def cut_anywhere(num_pieces: int, seed: int, *, length: int = 1024, height: int = 1024, unit: int = 1024, drop: float = 0.0) -> Instance:
    """Cuts at random places in random directions, larger pieces sooner: sizes and lives from 1 unit to the whole."""
    random = Random(seed)
    pieces = [(0, length, 0, height)]
    while len(pieces) < num_pieces:
        areas = [(b - a) * (d - c) for a, b, c, d in pieces]
        k = random.choices(range(len(pieces)), areas)[0]
        a, b, c, d = pieces[k]
        if random.random() < 0.5 and b - a > 1:
            cut = random.randrange(a + 1, b)
            pieces[k : k + 1] = [(a, cut, c, d), (cut, b, c, d)]
        elif d - c > 1:
            cut = random.randrange(c + 1, d)
            pieces[k : k + 1] = [(a, b, c, cut), (a, b, cut, d)]
    return _instance(pieces, random, height, unit, drop)


def cut_evenly(seed: int, *, levels: int = 9, full: int = 150, unit: int = 1024) -> Instance:
    """Every piece cut near its middle, most often across its longer side: many buffers of similar size.

    Nothing alive during a stretch of `full` time units is dropped, so the load there is the capacity throughout; the further
    from it, the more pieces are dropped.
    """
    random = Random(seed)
    pieces = [(0, 1024, 0, 1024)]
    for _ in range(levels):
        halves = []
        for a, b, c, d in pieces:
            share = random.uniform(0.35, 0.65)
            if (b - a) / 30 > (d - c) / 66:
                cut = a + round((b - a) * share)
                halves += [(a, cut, c, d), (cut, b, c, d)]
            else:
                cut = c + round((d - c) * share)
                halves += [(a, b, c, cut), (a, b, cut, d)]
        pieces = halves
    begin = random.randrange(1024 - full)
    kept = [
        p
        for p in pieces
        if random.random() > max(begin - p[1], p[0] - begin - full, 0) / 800 + (p[1] <= begin or p[0] >= begin + full) * 0.1
    ]
    return _instance(kept, random, 1024, unit, 0.0)


def cut_in_layers(num_pieces: int, seed: int, *, drop: float = 0.04, unit: int = 1024) -> Instance:
    """Cuts mostly along time: many thin buffers that live long, dozens at any moment."""
    random = Random(seed)
    pieces = [(0, 1024, 0, 1024)]
    while len(pieces) < num_pieces:
        k = random.choices(range(len(pieces)), [(b - a) * (d - c) for a, b, c, d in pieces])[0]
        a, b, c, d = pieces[k]
        if random.random() < 0.75 and d - c > 3:
            cut = c + round((d - c) * random.uniform(0.2, 0.8))
            pieces[k : k + 1] = [(a, b, c, cut), (a, b, cut, d)]
        elif b - a > 3:
            cut = a + round((b - a) * random.uniform(0.1, 0.9))
            pieces[k : k + 1] = [(a, cut, c, d), (cut, b, c, d)]
    return _instance(pieces, random, 1024, unit, drop)


def cut_in_pinwheels(num_pieces: int, seed: int, *, drop: float = 0.03, unit: int = 1024) -> Instance:
    """Cuts into five around a middle, which no sequence of straight cuts gives, among straight ones."""
    random = Random(seed)
    pieces = [(0, 1024, 0, 1024)]
    while len(pieces) < num_pieces:
        k = random.choices(range(len(pieces)), [(b - a) * (d - c) for a, b, c, d in pieces])[0]
        a, b, c, d = pieces[k]
        if b - a > 8 and d - c > 8 and random.random() < 0.5:
            p, q = sorted(random.sample(range(a + 1, b), 2))
            r, s = sorted(random.sample(range(c + 1, d), 2))
            pieces[k : k + 1] = [(a, q, c, r), (q, b, c, s), (p, b, s, d), (a, p, r, d), (p, q, r, s)]
        elif random.random() < 0.5 and b - a > 1:
            cut = random.randrange(a + 1, b)
            pieces[k : k + 1] = [(a, cut, c, d), (cut, b, c, d)]
        elif d - c > 1:
            cut = random.randrange(c + 1, d)
            pieces[k : k + 1] = [(a, b, c, cut), (a, b, cut, d)]
    return _instance(pieces, random, 1024, unit, drop)


def dropped(num_pieces: int, seed: int, *, unit: int = 1024) -> Instance:
    """Boxes let fall onto a skyline of 1,024 cells until none fits: holes everywhere, so the load stays a little below the capacity."""
    random = Random(seed)
    skyline = [0] * 1024
    mean_life, mean_size = random.choice([(40, 60), (150, 60), (250, 30)])
    pieces: list[tuple[int, int, int, int]] = []
    misses = 0
    while len(pieces) < num_pieces + 150 and misses < 400:
        life = min(1024, max(8, round(random.expovariate(1 / mean_life))))
        size = min(400, max(4, round(random.gauss(mean_size, mean_size / 3))))
        begin = min((random.randrange(1025 - life) for _ in range(12)), key=lambda t: max(skyline[t : t + life]))
        floor = max(skyline[begin : begin + life])
        top = floor + size if floor + size <= 1024 else 1024
        if top - floor < 4:
            misses += 1
            continue
        pieces.append((begin, begin + life, floor, top))
        skyline[begin : begin + life] = [top] * life
    return _instance(pieces, random, 1024, unit, 0.0)


def look_alikes(seeds: Sequence[int]) -> Iterator[tuple[str, Instance]]:
    """One instance of each shape for every seed, of 150 to 450 buffers, with its name."""
    for seed in seeds:
        random = Random(seed)
        num = random.randrange(150, 451)
        yield f"anywhere {seed}", cut_anywhere(num, seed, drop=random.choice((0.0, 0.03, 0.06)))
        yield f"evenly {seed}", cut_evenly(seed, full=random.choice((100, 150, 300)))
        yield f"layers {seed}", cut_in_layers(num, seed)
        yield f"pinwheels {seed}", cut_in_pinwheels(num, seed)
        yield f"dropped {seed}", dropped(num, seed)


def _instance(pieces: list[tuple[int, int, int, int]], random: Random, height: int, unit: int, drop: float) -> Instance:
    kept = [p for p in pieces if random.random() >= drop]
    random.shuffle(kept)
    buffers = tuple(Buffer(id=str(k), start=a * unit, stop=b * unit, size=(d - c) * unit) for k, (a, b, c, d) in enumerate(kept))
    return Instance(buffers, height * unit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["anywhere", "evenly"])
    parser.add_argument("seed", type=int)
    parser.add_argument("output", type=Path)
    parser.add_argument("--pieces", type=int, default=200)
    parser.add_argument("--drop", type=float, default=0.03)
    options = parser.parse_args()
    if options.kind == "anywhere":
        buffers, capacity = cut_anywhere(options.pieces, options.seed, drop=options.drop)
    else:
        buffers, capacity = cut_evenly(options.seed)
    lines = ["id,lower,upper,size", *(f"{b.id},{b.start},{b.stop},{b.size}" for b in buffers)]
    options.output.write_text("\n".join(lines) + "\n")
    print(f"{len(buffers)} buffers, feasible at capacity {capacity}")


if __name__ == "__main__":
    main()
