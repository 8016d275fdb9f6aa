"""Everything private to torch that memfit needs, Inductor aside (`compilers/inductor/`): one function per need, named by the need.

    probe      is the symbol there? else a sentence with the version, the need and the next move
    patch      replace functions of torch for a while, on versions that are known to bear it
    trees      nested arguments          tensors   storages, hooks, schemas       fake     tensors without data
    trace      the joint graph           recurrent layers traced as cells         cuda     streams, devices, cuBLAS
    checkpoints  torch.utils.checkpoint inside a model
    allocations  bytes held at most, by the allocator or torch's profiler

A new torch is tried with `make test-nightly`, which says which of these symbols are gone.
"""
