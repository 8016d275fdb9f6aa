"""Groups of ops that a compiler makes into one kernel or a few."""
