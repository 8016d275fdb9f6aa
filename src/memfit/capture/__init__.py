"""A training step -> Graph. `step.capture` traces a PyTorch model; `node_link` reads published graphs from files."""
