"""Rewrites of a whole captured step: its loss, the gradients of its concatenations."""
