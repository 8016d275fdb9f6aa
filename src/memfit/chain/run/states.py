"""A chain's state as the stores see it: the arrays and numbers at the leaves of a pytree, and the shape that holds them.

    {"u": array, "aux": (tensor, 0.5)}  ──flatten──>  [array, tensor, 0.5]  +  Structure   ──unflatten──>  the same again

NumPy arrays, torch tensors (any device), plain numbers and strings; in dicts, lists, tuples, named tuples and dataclasses.
torch is never imported here: a tensor can only arrive if the caller has imported it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.core.errors import Unsupported

SCALARS = (bool, int, float, str)
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Structure:
    """One node of a pytree's shape: its type, its keys, its children; a leaf has kind "leaf"."""

    kind: str
    type: type | None = None
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()

    def describe(self) -> str:
        if self.kind in ("leaf", "none"):
            return "*" if self.kind == "leaf" else "None"
        inner = ",".join(f"{key}:{child.describe()}" for key, child in zip(self.keys, self.children, strict=True))
        return f"{self.kind}({inner})"

    def to_json(self) -> Any:
        """As JSON, for trees of dicts, lists and tuples, which a file can bring back alone; None for other types."""
        if self.kind in ("leaf", "none"):
            return self.kind
        children = [child.to_json() for child in self.children]
        if self.kind not in ("dict", "list", "tuple") or None in children or not all(isinstance(k, str | int) for k in self.keys):
            return None
        return [self.kind, list(self.keys), children]

    @staticmethod
    def from_json(data: Any) -> Structure:
        if data in ("leaf", "none"):
            return Structure(data)
        kind, keys, children = data
        made = {"dict": dict, "list": list, "tuple": tuple}[kind]
        return Structure(kind, made, tuple(keys), tuple(map(Structure.from_json, children)))


_LEAF, _NONE = Structure("leaf"), Structure("none")


def flatten(tree: Any, where: str = "state") -> tuple[list[Any], Structure]:
    """The leaves in order, and the structure without them."""
    if tree is None:
        return [], _NONE
    if is_tensor(tree) or isinstance(tree, (np.ndarray, np.generic, *SCALARS)):
        if isinstance(tree, np.ndarray) and tree.dtype.hasobject:
            raise Unsupported(
                f"{where} is an array of Python objects: keep numbers in arrays, they alone can be copied and written safely."
            )
        return [tree], _LEAF
    kind, keys, values = _children(tree, where)
    leaves: list[Any] = []
    structures = []
    for key, value in zip(keys, values, strict=True):
        inner, structure = flatten(value, f"{where}[{key!r}]")
        leaves += inner
        structures.append(structure)
    return leaves, Structure(kind, type(tree), tuple(keys), tuple(structures))


def _children(tree: Any, where: str) -> tuple[str, list[Any], list[Any]]:
    if isinstance(tree, dict):
        return "dict", list(tree.keys()), list(tree.values())
    if isinstance(tree, (list, tuple)):
        return type(tree).__name__, list(range(len(tree))), list(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree)]
        return type(tree).__name__, names, [getattr(tree, name) for name in names]
    raise Unsupported(
        f"{where} is a {type(tree).__name__}: a state holds NumPy arrays, torch tensors, numbers and strings in dicts, lists, "
        "tuples and dataclasses; turn it into those."
    )


def unflatten(structure: Structure, leaves: Iterator[Any]) -> Any:
    """The tree back from its leaves."""
    if structure.kind == "none":
        return None
    if structure.kind == "leaf":
        return next(leaves)
    values = [unflatten(child, leaves) for child in structure.children]
    made = structure.type
    assert made is not None
    if issubclass(made, dict):
        return dict(zip(structure.keys, values, strict=True))
    if issubclass(made, tuple):
        return made(*values) if hasattr(made, "_fields") else tuple(values)
    if issubclass(made, list):
        return values
    return made(**dict(zip(structure.keys, values, strict=True)))


def is_tensor(leaf: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(leaf, torch.Tensor)


def is_cuda(leaves: list[Any]) -> bool:
    return any(is_tensor(leaf) and leaf.is_cuda for leaf in leaves)


def synchronize(tree: Any) -> None:
    """Wait for the device, so that a clock tells what was computed and not what was queued."""
    if is_cuda(flatten(tree)[0]):
        sys.modules["torch"].cuda.synchronize()


def leaf_bytes(leaf: Any) -> int:
    if is_tensor(leaf):
        return int(leaf.numel() * leaf.element_size())
    return int(leaf.nbytes) if isinstance(leaf, np.ndarray | np.generic) else 0


def tree_bytes(tree: Any) -> int:
    """Bytes of the arrays of a state; its plain numbers are not counted."""
    return sum(map(leaf_bytes, flatten(tree)[0]))


def copy_tree(tree: Any) -> Any:
    """The same state in memory of its own, where it is."""
    leaves, structure = flatten(tree)
    return unflatten(structure, iter([_copy(leaf) for leaf in leaves]))


def _copy(leaf: Any) -> Any:
    if is_tensor(leaf):
        return leaf.detach().clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def copy_to_host(tree: Any) -> Any:
    """A copy in host memory: pinned where it comes from a CUDA device, so that copies back can overlap."""
    leaves, structure = flatten(tree)
    copies = []
    for leaf in leaves:
        if is_tensor(leaf) and leaf.is_cuda:
            target = sys.modules["torch"].empty_like(leaf, device="cpu", pin_memory=True)
            target.copy_(leaf.detach())
            copies.append(target)
        else:
            copies.append(_copy(leaf))
    return unflatten(structure, iter(copies))


def move_like(tree: Any, model: Any, *, own: bool = False) -> Any:
    """A copy of `tree` with its tensors on the devices of `model`'s. `own`: nobody else uses `tree`, so what is in its place is not copied."""
    leaves, structure = flatten(tree)
    targets, _ = flatten(model)
    moved = [
        leaf.to(target.device, non_blocking=True)
        if is_tensor(leaf) and is_tensor(target) and leaf.device != target.device
        else (leaf if own else _copy(leaf))
        for leaf, target in zip(leaves, targets, strict=True)
    ]
    return unflatten(structure, iter(moved))


def move_to_device_of(tree: Any, model: Any) -> Any:
    """`tree`'s tensors on the CUDA device of `model`'s, if it has one."""
    devices = [leaf.device for leaf in flatten(model)[0] if is_tensor(leaf) and leaf.is_cuda]
    if not devices:
        return tree
    leaves, structure = flatten(tree)
    return unflatten(structure, iter([leaf.to(devices[0]) if is_tensor(leaf) else leaf for leaf in leaves]))


def view_bytes(leaf: Any) -> memoryview:
    """A leaf's bytes as they lie in memory, without a copy where they are contiguous on the host."""
    if is_tensor(leaf):
        torch = sys.modules["torch"]
        flat = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return memoryview(flat.numpy().data)
    return memoryview(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)


def leaf_header(leaf: Any) -> dict[str, Any]:
    """What a file must say about a leaf so that it can be made again."""
    if is_tensor(leaf):
        return {"kind": "torch", "dtype": str(leaf.dtype).removeprefix("torch."), "shape": list(leaf.shape), "bytes": leaf_bytes(leaf)}
    if isinstance(leaf, np.ndarray | np.generic):
        kind = "numpy" if isinstance(leaf, np.ndarray) else "number"
        return {"kind": kind, "dtype": leaf.dtype.str, "shape": list(leaf.shape), "bytes": int(leaf.nbytes)}
    return {"kind": "scalar", "value": leaf, "type": type(leaf).__name__, "bytes": 0}


def make_leaf(header: dict[str, Any], data: Bytes) -> Any:
    """The leaf back from its header and bytes (which become its memory)."""
    if header["kind"] == "scalar":
        return header["value"]
    if header["kind"] == "torch":
        torch = sys.modules["torch"]
        dtype = getattr(torch, header["dtype"])
        if not len(data):
            return torch.empty(header["shape"], dtype=dtype)
        return torch.from_numpy(data).view(dtype).reshape(header["shape"])
    array = data.view(np.dtype(header["dtype"])).reshape(header["shape"])
    return array[()] if header["kind"] == "number" else array
