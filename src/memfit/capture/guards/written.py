"""Python state that a trace must leave alone: attributes of modules, and what lies in them, kept before and put back after."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memfit.capture.guards.values import is_plain

_DEPTH = 3


class Kept:
    """Contents of every container and object that can be reached from a model's attributes. A restore names what had changed."""

    def __init__(self, model: nn.Module) -> None:
        self._kept: list[tuple[str, Any, Any]] = []
        self._seen: set[int] = set()
        for name, module in model.named_modules():
            self._keep(f"model.{name}" if name else "model", module, 0)

    def _keep(self, path: str, value: Any, depth: int) -> None:
        if is_plain(value) or isinstance(value, torch.Tensor) or id(value) in self._seen or depth > _DEPTH:
            return
        self._seen.add(id(value))
        if isinstance(value, (dict, list, set, deque)):
            self._kept.append((path, value, value.copy()))
            inside: Iterator[tuple[Any, Any]] = iter(value.items() if isinstance(value, dict) else enumerate(value))
        elif (isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type) and not callable(value)) or isinstance(
            value, nn.Module
        ):
            self._kept.append((path, vars(value), dict(vars(value))))
            inside = iter(vars(value).items())
        else:
            return
        for name, item in list(inside):
            if not (isinstance(item, nn.Module) or str(name) in ("_modules", "_parameters")):
                self._keep(f"{path}.{name}", item, depth + 1)

    def restore(self) -> list[str]:
        """Put everything back; the names of what was not as before."""
        changed = []
        for path, now, before in self._kept:
            if isinstance(now, dict):
                names = [k for k in {**before, **now} if not _same(now.get(k, self), before.get(k, self))]
                changed += [f"{path}.{name}" for name in names]
                if names or list(now) != list(before):
                    now.clear()
                    now.update(before)
            elif isinstance(now, set):
                if now != before:
                    changed.append(path)
                    now.clear()
                    now.update(before)
            elif len(now) != len(before) or not all(map(_same, now, before)):
                changed.append(path)
                now.clear()
                now.extend(before)
        return changed


def _same(now: Any, before: Any) -> bool:
    return now is before or (is_plain(now) and type(now) is type(before) and bool(now == before))
