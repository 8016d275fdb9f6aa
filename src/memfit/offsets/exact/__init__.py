"""The exact search for a packing under a capacity: one search, its compiled kernel, and a race of many."""
