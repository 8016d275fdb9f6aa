"""Captured + Plan -> something to call. The eager engine runs a plan as straight-line code over aten ops."""
