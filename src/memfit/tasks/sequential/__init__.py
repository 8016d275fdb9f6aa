"""Orders for one processor, and the search for the one of least peak."""
