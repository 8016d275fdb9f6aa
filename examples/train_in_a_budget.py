"""An image classifier trained inside a byte budget: the same losses as plain PyTorch, in less memory.

Two copies of one network are trained side by side on synthetic images, one as it is and one by `memfit.fit`. The losses must agree to the last bit.

    python examples/train_in_a_budget.py --steps 5 --share 0.6
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
from torch import nn

import memfit
from memfit.core.units import format_bytes


def network(width: int = 16, num_blocks: int = 6) -> nn.Sequential:
    def block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())

    blocks = [block(3, width), *(block(width, width) for _ in range(num_blocks)), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*blocks, nn.Dropout(0.1), nn.Linear(width, 10))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=48, help="of the images")
    parser.add_argument("--share", type=float, default=0.6, help="of what the plain step needs")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    plain = network()
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, model)]
    loss_fn = nn.functional.cross_entropy
    images, labels = torch.randn(options.batch, 3, options.size, options.size), torch.randint(0, 10, (options.batch,))

    needed = memfit.estimate(model, (images,), optimizer=optimizers[1], loss_fn=loss_fn, example_targets=(labels,)).peak_bytes
    budget = int(options.share * needed)
    print(f"the plain step needs {format_bytes(needed)}, the budget is {format_bytes(budget)}")
    fitted = memfit.fit(
        model,
        (images,),
        budget=budget,
        optimizer=optimizers[1],
        loss_fn=loss_fn,
        example_targets=(labels,),
        allow=("recompute",),  # the same kernels: the same bits
        time_limit_s=5,
    )
    steps = (lambda: loss_fn(plain(images), labels), lambda: fitted(images, labels))
    for number in range(options.steps):
        losses = []
        for step, optimizer in zip(steps, optimizers, strict=True):
            torch.manual_seed(number)
            optimizer.zero_grad()
            loss = step()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"step {number}: plain {losses[0]:.6f}, inside the budget {losses[1]:.6f}")
        if losses[0] != losses[1]:
            return 1
    print(fitted.report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
