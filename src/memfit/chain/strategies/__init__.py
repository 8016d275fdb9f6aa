"""One file per way to plan a chain: what is kept where, and what is computed again."""
