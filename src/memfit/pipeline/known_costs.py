"""What ops cost on this machine, as measured before: kept on disk by digest, so that a second start measures and compiles next to nothing.

A broken cache is a cold cache, never an error.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from memfit.capture.captured import Captured, Ref, Role
from memfit.core.cache_folder import cache_folder, warn_once
from memfit.core.costs import Costs
from memfit.core.files import write_whole
from memfit.kernels.implementation import Implementation
from memfit.profile.measure import Form, Measured
from memfit.torch_private.trees import map_leaves

_saving = Lock()
_METHOD = 3  # figures measured in another way are other figures
_MOST_NS = 2**62


class Cache:
    """(device, signature) -> (time_ns, workspace_bytes), in one JSON file."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = (folder or cache_folder()) / "op_costs_v1.json"
        self._entries: dict[str, list[int]] = _read(self._path)
        self._dirty = False

    def get(self, device: str, signature: str) -> tuple[int, int] | None:
        entry = self._entries.get(_key(device, signature))
        return None if entry is None else (entry[0], entry[1])

    def put(self, device: str, signature: str, costs: tuple[int, int]) -> None:
        self._entries[_key(device, signature)] = list(costs)
        self._dirty = True

    def save(self) -> None:
        """Merge with what others wrote meanwhile, and replace the file whole. A folder that cannot be written is said once."""
        if not self._dirty:
            return
        try:
            with _saving:  # threads of this process; of two processes that save at once one may lose what it measured
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._entries = {**_read(self._path), **self._entries}
                with write_whole(self._path) as file:
                    file.write(json.dumps(self._entries).encode())
            self._dirty = False
        except OSError as error:
            warn_once(f"measured costs cannot be kept in {self._path.parent} ({error.strerror or error}): the next start measures again.")


class StepCosts:
    """The costs of a step's ops on the device where its model lives, as far as they are known. Ops that run the same kernel on the same
    shapes are measured once."""

    def __init__(self, captured: Captured, cache: Cache | None = None) -> None:
        self.captured, self._cache = captured, cache or Cache()
        self._device = name_of(captured.device)
        forms = [(op.id, v) for op in captured.graph.ops for v in range(len(op.forms))]
        self._signatures = {form: signature(captured, *form) for form in forms if _takes_time(captured, *form)}

    def missing(self) -> list[Form]:
        """What has to be measured, and compiled before that."""
        distinct = {text: form for form, text in reversed(self._signatures.items())}
        return [form for text, form in distinct.items() if self._cache.get(self._device, text) is None]

    def fill(self, measured: Measured) -> Costs:
        """Time and workspace of every op, now that all are known."""
        for form, pair in measured.costs.items():
            self._cache.put(self._device, self._signatures[form], pair)
        self._cache.save()
        estimated = {self._signatures[form]: pair for form, pair in measured.estimated.items()}  # not kept
        ops = self.captured.graph.ops
        plain = [self._cost(op.id, 0, estimated) for op in ops]
        others = [tuple(self._cost(op.id, v, estimated) for v in range(1, len(op.forms))) for op in ops]
        return Costs(
            op_time_ns=tuple(p[0] for p in plain),
            workspace_bytes=self.captured.put_in_fixed_workspace(p[1] for p in plain),
            variant_time_ns=tuple(tuple(p[0] for p in pairs) for pairs in others),
            variant_workspace_bytes=tuple(tuple(p[1] for p in pairs) for pairs in others),
            levels=(measured.link,),
            device=self._device,
            graph_digest=self.captured.graph.digest,
        )

    def known_or(self, table: Costs) -> Costs:
        """Without measuring anything: a table's costs with the workspaces that are known, and with the times too where all of them are."""

        def pair(op: int, variant: int) -> tuple[int, int]:
            text = self._signatures.get((op, variant))
            known = None if text is None else self._cache.get(self._device, text)
            time_ns, workspace = table.time_ns(op, variant), table.workspace(op, variant)
            return (time_ns, workspace) if known is None else (time_ns if missing else known[0], known[1])

        missing, ops = bool(self.missing()), self.captured.graph.ops
        plain = [pair(op.id, 0) for op in ops]
        others = [tuple(pair(op.id, v) for v in range(1, len(op.forms))) for op in ops]
        return replace(
            table,
            op_time_ns=tuple(p[0] for p in plain),
            workspace_bytes=self.captured.put_in_fixed_workspace(p[1] for p in plain),
            variant_time_ns=tuple(tuple(p[0] for p in pairs) for pairs in others),
            variant_workspace_bytes=tuple(tuple(p[1] for p in pairs) for pairs in others),
        )

    def _cost(self, op: int, variant: int, estimated: dict[str, tuple[int, int]]) -> tuple[int, int]:
        text = self._signatures.get((op, variant))
        if text is None:
            return 0, 0
        known = estimated.get(text) or self._cache.get(self._device, text)
        if known is None:  # a variant that cannot run here: no plan takes it at this price
            plain_ns, _ = self._cost(op, 0, estimated)
            return 1000 * max(plain_ns, 1), sum(s.size_bytes for s in self.captured.graph.storages)
        return known


def _takes_time(captured: Captured, op: int, variant: int) -> bool:
    return captured.call(op, variant).role is Role.CALL and (variant > 0 or not captured.is_free(op))


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu-{torch.get_num_threads()}"


def signature(captured: Captured, op: int, variant: int = 0) -> str:
    """Equal for calls that run the same kernel on the same shapes."""
    call, name = captured.call(op, variant), captured.graph.ops[op].form(variant).name
    if variant:
        name = f"{captured.graph.ops[op].name} {name}"
    if isinstance(call.target, Implementation):
        name = f"{name} {call.target.name}"

    def describe(value: Any) -> Any:
        if isinstance(value, Ref):
            sample = captured.samples[value.tensor]
            return "?" if sample is None else (str(sample.dtype), tuple(sample.shape), sample.stride())
        return repr(value)

    return f"{_METHOD} {torch.__version__} {name} {map_leaves(describe, (call.args, dict(call.kwargs)))} {_settings()}"


def _settings() -> str:
    return f"{torch.backends.cuda.matmul.allow_tf32}{torch.backends.cudnn.allow_tf32}{torch.backends.cudnn.benchmark}"


def _key(device: str, signature: str) -> str:
    return hashlib.sha256(f"{device}\n{signature}".encode()).hexdigest()[:24]


def _read(path: Path) -> dict[str, list[int]]:
    """What can be made sense of; a file that holds something else is said once, and replaced by the next save."""
    try:
        data = json.loads(path.read_bytes())
    except OSError:  # there is none, or saving will say what is wrong
        return {}
    except (ValueError, RecursionError) as error:
        warn_once(f"measured costs in {path} cannot be read ({type(error).__name__}): they are measured again.")
        return {}
    return {k: v for k, v in data.items() if _is_entry(v)} if isinstance(data, dict) else {}


def _is_entry(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(x) is int and 0 <= x < _MOST_NS for x in value)
