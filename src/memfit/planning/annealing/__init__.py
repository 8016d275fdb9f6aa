"""Simulated annealing and beam search over sequences, for graphs where linear programs say little."""
