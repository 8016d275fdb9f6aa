"""Inductor as the compiler of regions: what it takes apart, which ops it fuses, and its code for a piece of the step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from memfit.compilers.inductor import private
from memfit.compilers.inductor.cache_keys import CODE_VERSION, pickle_formats_by_name, skip_key_log
from memfit.compilers.inductor.code_folder import with_room
from memfit.compilers.inductor.kernel_builders import build_together
from memfit.compilers.inductor.lowerings import add_contiguous_first, choose_thresholds, count_wide_reads, inline_pools, lowering
from memfit.core.errors import Unsupported
from memfit.torch_private.fake import fake_mode, shared_fake_mode
from memfit.torch_private.patch import patch_torch
from memfit.torch_private.probe import require_tested
from memfit.torch_private.trace import trace_function

aten, prims = torch.ops.aten, torch.ops.prims
Compiled = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

# Traced whole, so that the loss can be found and done in chunks; a region with one takes it apart itself.
_LOSS = (aten._log_softmax.default, aten._log_softmax_backward_data.default, aten.nll_loss_forward.default, aten.nll_loss_backward.default)
# Their rules are for other inputs (complex numbers, a type left out, empty parts) than tracing with the same rules leaves in a graph.
_ASKED_BEFORE = (aten.add.Tensor, aten.cat.default, aten.full.default)
# Inductor lowers these, but to a library's kernel that shares nothing with its neighbours.
_LIBRARY = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.convolution_backward, aten._convolution}


@dataclass(frozen=True, slots=True)
class Inductor:
    """A `passes.regions.compiler.Compiler`. `pads`: matrix products of odd sizes are padded where that is faster."""

    pads: bool = True

    @property
    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """Inductor's own, less the loss, which is looked for whole. Refuses a torch that memfit is not tested on."""
        require_tested("compile regions", 'Use engine="eager"')
        rules = {target: rule for target, rule in decomposition_table().items() if target not in _LOSS}
        return rules | {aten.add.Tensor: add_contiguous_first(rules.get(aten.add.Tensor))}

    def improve(self, module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """Padding of matrix products, attention patterns, seeds of random numbers drawn together; biases beside their convolutions."""
        config, run_passes = private.config(), private.joint_graph_passes()
        mode = shared_fake_mode(n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder")
        try:
            with config.patch(shape_padding=self.pads and config.shape_padding), private.virtual().set_fake_mode(mode):
                improved: torch.fx.GraphModule = run_passes(_biases_apart(module))
        except Exception as error:
            what = f"{type(error).__name__}: {str(error)[:200]}"
            raise Unsupported(f'Inductor could not prepare the step ({what}): use engine="eager".') from error
        return _seeds_apart(improved)

    def fuses(self, target: Any) -> bool:
        if target in _LOSS:
            return True
        known = lowering()
        packet = getattr(target, "overloadpacket", None)
        return target in known.lowerings and target not in known.fallbacks and packet not in _LIBRARY

    def compile(self, module: torch.fx.GraphModule, samples: Sequence[torch.Tensor]) -> Compiled:
        """Inductor's code; where it fails, the ops one by one, or kernel by kernel if random numbers are drawn, which only Inductor can."""
        if any(n.target in decomposition_table() and n.target not in _ASKED_BEFORE for n in module.graph.nodes):
            module = _decompose(module, samples)
        cast = _compile_lone_cast(module)
        if cast is not None:
            return cast
        try:
            return with_room(lambda: _compile(module, samples))
        except Exception:
            if not any(n.target is prims.inductor_random.default for n in module.graph.nodes):
                return _run_one_by_one(module)
        try:
            with private.config().patch(max_fusion_size=1):
                return with_room(lambda: _compile(module, samples))
        except Exception as error:
            what = f"{type(error).__name__}: {str(error)[:200]}"
            raise Unsupported(f'Inductor could not compile a piece that draws random numbers ({what}): use engine="eager".') from error

    def together(self) -> AbstractContextManager[Callable[[], bool]]:
        """Kernels of all pieces compiled inside this block are built side by side; gives a function that takes in what has been built."""
        return build_together()


@functools.cache
def decomposition_table() -> Mapping[Any, Callable[..., Any]]:
    lowering()  # decompositions look into it
    return dict(private.select_decomp_table()())


def _biases_apart(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A convolution's bias is added by a kernel of its own: as an op of its own it is fused with what follows."""
    for node in module.graph.find_nodes(op="call_function", target=aten.convolution.default):
        bias, sample = node.args[2], node.meta["val"]
        if bias is None:
            continue
        with module.graph.inserting_after(node):
            shape = [1, -1, *[1] * (sample.dim() - 2)]
            view = module.graph.call_function(aten.view.default, (bias, shape))
            view.meta = {**node.meta, "val": bias.meta["val"].view(shape)}
        with module.graph.inserting_after(view):
            total = module.graph.call_function(aten.add.Tensor, (node, view))
            total.meta = dict(node.meta)
        node.replace_all_uses_with(total, delete_user_cb=lambda user, total=total: user is not total)
        node.update_arg(2, None)
    return module


def _seeds_apart(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Seeds are drawn together and looked up by number; as views of their own, equal layers are equal code. Two apart: kernels
    want their inputs aligned to 16 bytes."""
    for node in module.graph.find_nodes(op="call_function", target=prims.inductor_seeds.default):
        node.update_arg(0, 2 * node.args[0])
        sample = node.meta["val"] = node.meta["val"].repeat(2)
        for user in list(node.users):
            place = 2 * user.args[1]
            with module.graph.inserting_before(user):
                one = module.graph.call_function(aten.slice.Tensor, (node, 0, place, place + 1))
                one.meta = {**node.meta, "val": sample[place : place + 1]}
            user.args = (one, 0)
    return module


def _decompose(module: torch.fx.GraphModule, samples: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    with shared_fake_mode(samples):
        return trace_function(module, samples, table=decomposition_table(), mode="real")


def _compile(module: torch.fx.GraphModule, samples: Sequence[torch.Tensor]) -> Compiled:
    for node in module.graph.nodes:
        node.meta = {}  # Inductor finds out itself; in a key on disk it would be read, and a writer has none
    (output,) = module.graph.find_nodes(op="output")
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    mode = fake_mode(shape_env=private.shape_env()())
    with mode:
        given = [torch.empty_strided(s.shape, s.stride(), dtype=s.dtype, device=s.device) for s in samples]
    # Inductor keeps code on disk only for what is traced with a shape environment.
    with (
        torch.no_grad(),
        private.tracing()(private.tracing_context()(mode)),
        private.config().patch({"triton.cudagraphs": False} | choose_thresholds(module)),
        torch.compiler.config.patch(cache_key_tag=CODE_VERSION),  # type: ignore[attr-defined]
        pickle_formats_by_name(),
        patch_torch("compile regions", *skip_key_log(), *count_wide_reads(), *inline_pools()),
    ):
        code: Any = private.compile_fx_inner()(module, given, cudagraphs=private.boxed_bool()(False))
    compiled: Compiled = getattr(code, "current_callable", None) or code
    return compiled


def _compile_lone_cast(module: torch.fx.GraphModule) -> Compiled | None:
    """A piece that only changes the type of its one input needs no kernel of its own."""
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    if len(calls) != 1 or calls[0].target is not prims.convert_element_type.default or calls[0].args[0] not in inputs:
        return None
    dtype = calls[0].args[1]
    return lambda given: [given[0].to(dtype, copy=True)]


def _run_one_by_one(module: torch.fx.GraphModule) -> Compiled:
    def run(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        made: Sequence[torch.Tensor] = module(*inputs)
        return made

    return run
