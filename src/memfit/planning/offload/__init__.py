"""Values that wait on the host: send and fetch as ops of the graph."""
