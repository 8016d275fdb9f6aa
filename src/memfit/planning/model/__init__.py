"""The planning problem as arrays: the graph made small, a fast judge of sequences, bounds that hold for every plan."""
