"""Inductor as the compiler of regions: everything private to torch that the fast engine needs, run on torch 2.11 and 2.13."""

from __future__ import annotations

import atexit
import copyreg
import functools
import gc
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from memfit.compilers.inductor.lowerings import dense_first, lowering, pools_inline, small_reads_free, thresholds
from memfit.core.errors import Unsupported

aten, prims = torch.ops.aten, torch.ops.prims
Compiled = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

# Traced whole, so that the loss can be found and done in chunks; a region with one takes it apart itself.
_LOSS = (aten._log_softmax.default, aten._log_softmax_backward_data.default, aten.nll_loss_forward.default, aten.nll_loss_backward.default)
# Their rules are for other inputs (complex numbers, a type left out, empty parts) than tracing with the same rules leaves in a graph.
_ASKED_BEFORE = (aten.add.Tensor, aten.cat.default, aten.full.default)
_CODE = "memfit 3"  # in keys on disk: what is written for the same graph changes with `inductor_memory`
# Inductor lowers these, but to a library's kernel that shares nothing with its neighbours.
_LIBRARY = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.convolution_backward, aten._convolution}


@dataclass(frozen=True, slots=True)
class Inductor:
    """A `capture.compiler.Compiler`. `pads`: matrix products of odd sizes are padded where that is faster."""

    pads: bool = True

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        _wake_workers()
        rules = {target: rule for target, rule in decomposition_table().items() if target not in _LOSS}
        return rules | {aten.add.Tensor: dense_first(rules.get(aten.add.Tensor))}

    def improve(self, module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """Padding of matrix products, attention patterns, seeds of random numbers drawn together; biases beside their convolutions."""
        from torch._inductor import config
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes
        from torch._inductor.virtualized import V

        mode = _fake_mode([n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"])
        try:
            with config.patch(shape_padding=self.pads and config.shape_padding), V.set_fake_mode(mode):
                improved: torch.fx.GraphModule = joint_graph_passes(_biases_apart(module))
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
        """Inductor's code, or the ops one by one where it has none."""
        if any(n.target in decomposition_table() and n.target not in _ASKED_BEFORE for n in module.graph.nodes):
            module = _decomposed(module, samples)
        cast = _lone_cast(module)
        if cast is not None:
            return cast
        try:
            return _compile(module, samples)
        except Exception as error:
            if any(n.target is prims.inductor_random.default for n in module.graph.nodes):
                raise Unsupported(
                    f'Inductor could not compile a piece that draws random numbers ({type(error).__name__}: {str(error)[:200]}): use engine="eager".'
                ) from error
            return _one_by_one(module)

    @contextmanager
    def together(self) -> Iterator[Callable[[], bool]]:
        """Kernels of all pieces compiled inside this block are built side by side: code for the next is written meanwhile.

        Gives a function for whoever has nothing else to do: it takes in what has been built, and says whether that is all.
        """
        from torch._inductor.async_compile import AsyncCompile

        wait, is_ready = AsyncCompile.wait, AsyncCompile.__dict__["use_process_pool"]
        waiting = list[tuple[AsyncCompile, dict[str, Any]]]()

        def settle() -> bool:
            entries = [(_is_built(scope), builder, scope) for builder, scope in waiting]
            waiting[:] = [(builder, scope) for built, builder, scope in entries if not built]
            for built, builder, scope in entries:
                if built:
                    wait(builder, scope)
            return not waiting

        AsyncCompile.wait = lambda builder, scope: waiting.append((builder, scope))  # type: ignore[assignment,method-assign]
        AsyncCompile.use_process_pool = classmethod(_queues)  # type: ignore[assignment,method-assign]
        try:
            with without_collecting():
                yield settle
        finally:
            AsyncCompile.wait, AsyncCompile.use_process_pool = wait, is_ready  # type: ignore[method-assign]
            for builder, scope in waiting:
                wait(builder, scope)


@contextmanager
def without_collecting() -> Iterator[None]:
    """Writing makes millions of small objects and hardly a cycle among them: a seventh of its time went into looking for some."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _is_built(scope: Mapping[str, Any]) -> bool:
    """Whether the kernels that a module of generated code waits for have come out of the pool."""
    from torch._inductor.codecache import CodeCacheFuture

    kernels = [v for v in scope.values() if isinstance(v, CodeCacheFuture)]
    return all((job := getattr(k, "future", None)) is not None and job.done() for k in kernels)


def _queues(builder: type) -> bool:
    """In place of whether the processes that build kernels are awake: until then Inductor would build here, one after another."""
    from torch._inductor import config
    from torch._inductor.async_compile import get_compile_threads

    return get_compile_threads() > 1 and not getattr(config.triton, "proton_profiling", False)


@functools.cache
def _wake_workers() -> None:
    """The processes that build kernels take seconds to start: they do so while the model is traced."""
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.warm_pool()
    AsyncCompile.use_process_pool()
    if AsyncCompile._ready_future is not None:
        _widen(AsyncCompile.process_pool())


def _widen(pool: Any) -> bool:
    """Let a pool take jobs before its process is awake to read them: a pipe of the usual size holds a few kernels, and then we wait."""
    try:
        import fcntl

        return fcntl.fcntl(pool.write_pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES) >= _PIPE_BYTES
    except (ImportError, AttributeError, OSError):  # not Linux, another kind of pool, not allowed
        return False


# -- processes that write code ---------------------------------------------------------------------------------------

_MOST_WRITERS = 12
_PIPE_BYTES = 2**20
_PRECISIONS = (
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
)


def num_writers() -> int:
    """How many would pay: three of four cores (kernels are built beside), if Inductor keeps anything on disk."""
    from torch._inductor import config
    from torch._inductor.async_compile import get_compile_threads

    return min(get_compile_threads() * 3 // 4, _MOST_WRITERS) if config.fx_graph_cache and not config.force_disable_caches else 0


@functools.cache
def writer_pool() -> Any:
    """Processes that can use the GPU, which a fork of this one could not (`compilers/inductor/fork_server.py`). `end_writer_pool` when they are done."""
    import torch._inductor.compile_worker.__main__ as server
    from torch._inductor.compile_worker.subproc_pool import SubprocKind, SubprocPool

    from memfit.compilers.inductor.fork_server import Preparing, is_fork_server, without_the_driver

    kind = SubprocKind.FORK if is_fork_server(server) else SubprocKind.SPAWN
    with without_the_driver():
        pool = SubprocPool(num_writers(), pickler=Preparing(), kind=kind, quiesce=True)
    _widen(pool)
    atexit.register(end_writer_pool)
    return pool


def end_writer_pool() -> None:
    """If there is one: now, whatever it is doing."""
    if writer_pool.cache_info().currsize:
        pool = writer_pool()
        writer_pool.cache_clear()
        _end(pool)


def _end(pool: Any) -> None:
    with pool.write_lock:
        pool.running = False  # nobody need be told that it ended
    if pool.timer is not None:
        pool.timer.quit()
    try:
        os.killpg(pool.process.pid, signal.SIGKILL)  # writers are in its group
    except OSError:  # as long as it has none of its own it has no writers
        pool.process.kill()
    pool.process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What decides besides the graph which code Inductor writes, as this process has it."""

    cache_folder: str
    inductor: bytes
    precisions: tuple[bool, ...]
    deterministic: bool
    default_dtype: torch.dtype
    num_threads: int

    @classmethod
    def here(cls) -> Settings:
        from torch._inductor import config

        return cls(
            cache_folder=str(code_folder()),
            inductor=config.save_config(),
            precisions=tuple(getattr(where, name) for where, name in _PRECISIONS),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            default_dtype=torch.get_default_dtype(),
            num_threads=torch.get_num_threads(),
        )

    def apply(self) -> None:
        from torch._inductor import config

        lowering()  # Inductor's own ops
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = self.cache_folder
        config.load_config(self.inductor)
        for (where, name), value in zip(_PRECISIONS, self.precisions, strict=True):
            if getattr(where, name) != value:  # saying no to what nobody asked for is another setting than saying nothing
                setattr(where, name, value)
        torch.use_deterministic_algorithms(self.deterministic)
        torch.set_default_dtype(self.default_dtype)
        torch.set_num_threads(self.num_threads)


def code_folder() -> Path:
    """Where Inductor keeps code."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def leave_kernels_out() -> None:
    """In a writer's process: kernels for the GPU are built where they run, so a writer takes nothing of its memory."""
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.triton = lambda *_, **__: None  # type: ignore[method-assign]


@functools.cache
def decomposition_table() -> Mapping[Any, Callable[..., Any]]:
    lowering()  # decompositions look into it
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def _fake_mode(values: Sequence[Any]) -> FakeTensorMode:
    found = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)
    return found or FakeTensorMode()


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


def _decomposed(module: torch.fx.GraphModule, samples: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    with _fake_mode(samples):
        traced: torch.fx.GraphModule = make_fx(module, decomposition_table=decomposition_table(), tracing_mode="real")(*samples)
    return traced


def _compile(module: torch.fx.GraphModule, samples: Sequence[torch.Tensor]) -> Compiled:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    for node in module.graph.nodes:
        node.meta = {}  # Inductor finds out itself; in a key on disk it would be read, and a writer has none
    (output,) = module.graph.find_nodes(op="output")
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        given = [torch.empty_strided(s.shape, s.stride(), dtype=s.dtype, device=s.device) for s in samples]
    # Inductor keeps code on disk only for what is traced with a shape environment.
    with (
        torch.no_grad(),
        tracing(TracingContext(mode)),
        config.patch({"triton.cudagraphs": False} | thresholds(module)),
        torch.compiler.config.patch(cache_key_tag=_CODE),  # type: ignore[attr-defined]
        _same_keys_everywhere(),
        _keys_without_reasons(),
        small_reads_free(),
        pools_inline(),
    ):
        code: Any = compile_fx_inner(module, given, cudagraphs=BoxedBool(False))
    compiled: Compiled = getattr(code, "current_callable", None) or code
    return compiled


@contextmanager
def _same_keys_everywhere() -> Iterator[None]:
    """Inductor's keys on disk are hashes of pickles, and a memory format is pickled with the name of whichever module of this process
    imported torch first: another script would not find what this one left."""
    copyreg.pickle(torch.memory_format, lambda value: (_format_named, (str(value).removeprefix("torch."),)))
    try:
        yield
    finally:
        copyreg.dispatch_table.pop(torch.memory_format, None)


@contextmanager
def _keys_without_reasons() -> Iterator[None]:
    """Beside a key Inductor makes a line of text for each of the 600 settings in it, for its log: half of the time of finding code on disk."""
    from torch._inductor.codecache import FxGraphCachePickler

    lines = FxGraphCachePickler.__dict__.get("debug_lines")
    if lines is not None:
        FxGraphCachePickler.debug_lines = lambda _, __: []  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        if lines is not None:
            FxGraphCachePickler.debug_lines = lines  # type: ignore[method-assign]


def _format_named(name: str) -> torch.memory_format:
    found: torch.memory_format = getattr(torch, name)
    return found


def _lone_cast(module: torch.fx.GraphModule) -> Compiled | None:
    """A piece that only changes the type of its one input needs no kernel of its own."""
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    if len(calls) != 1 or calls[0].target is not prims.convert_element_type.default or calls[0].args[0] not in inputs:
        return None
    dtype = calls[0].args[1]
    return lambda given: [given[0].to(dtype, copy=True)]


def _one_by_one(module: torch.fx.GraphModule) -> Compiled:
    def run(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        made: Sequence[torch.Tensor] = module(*inputs)
        return made

    return run
