"""Inductor as the compiler of regions: everything private to torch that the compiled engine needs."""
