"""Runs a chain of the user's own functions, with states in memory, on the host and on disk."""
