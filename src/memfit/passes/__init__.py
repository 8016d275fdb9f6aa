"""Rewrites of a step: a captured step in, the same step in another form out."""
