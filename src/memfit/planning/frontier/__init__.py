"""The best (peak, time) pairs of a graph."""
