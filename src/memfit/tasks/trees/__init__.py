"""Where task graphs come from: trees, generators, sparse matrices, files."""
