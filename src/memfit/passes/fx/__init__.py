"""Rewrites of the traced FX graph, before it is lowered."""
