"""Task graphs on Dask workers inside a memory bound (extra `dask`)."""
