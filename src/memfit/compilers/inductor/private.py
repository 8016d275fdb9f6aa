"""Names of Inductor that memfit uses, each looked up when it is first called (`torch_private/probe.py`)."""

from __future__ import annotations

from memfit.torch_private.probe import Symbol


def _symbol(path: str, need: str = "compile regions", optional: bool = False) -> Symbol:
    return Symbol(path, need, optional)


config = _symbol("torch._inductor.config")
compile_fx_inner = _symbol("torch._inductor.compile_fx.compile_fx_inner")
select_decomp_table = _symbol("torch._inductor.decomposition.select_decomp_table")
joint_graph_passes = _symbol("torch._inductor.fx_passes.joint_graph.joint_graph_passes")
boxed_bool = _symbol("torch._inductor.utils.BoxedBool")
virtual = _symbol("torch._inductor.virtualized.V")
shape_env = _symbol("torch.fx.experimental.symbolic_shapes.ShapeEnv")
tracing = _symbol("torch._guards.tracing")
tracing_context = _symbol("torch._guards.TracingContext")
graph_pickler = _symbol("torch._inductor.codecache.FxGraphCachePickler", "find compiled code on disk")

lowering = _symbol("torch._inductor.lowering", "write code for regions")
lower_max_pool = _symbol("torch._inductor.lowering._max_pool_with_offsets", "fuse max pools with what they read", optional=True)
storage_box = _symbol("torch._inductor.ir.StorageBox", "write code for regions")
pointwise = _symbol("torch._inductor.ir.Pointwise", "write code for regions")
reduction = _symbol("torch._inductor.ir.Reduction", "write code for regions")
ops = _symbol("torch._inductor.virtualized.ops", "write code for regions")
floor_div = _symbol("torch.utils._sympy.functions.FloorDiv", "write code for regions")
modular_indexing = _symbol("torch.utils._sympy.functions.ModularIndexing", "write code for regions")

async_compile = _symbol("torch._inductor.async_compile.AsyncCompile", "build kernels together")
compile_threads = _symbol("torch._inductor.async_compile.get_compile_threads", "build kernels together")
code_future = _symbol("torch._inductor.codecache.CodeCacheFuture", "build kernels together")

worker_main = _symbol("torch._inductor.compile_worker.__main__", "write code in several processes")
pool = _symbol("torch._inductor.compile_worker.subproc_pool.SubprocPool", "write code in several processes")
pool_kind = _symbol("torch._inductor.compile_worker.subproc_pool.SubprocKind", "write code in several processes")
