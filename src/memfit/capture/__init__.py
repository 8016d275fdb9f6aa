"""Capture: a training step, a tape or a file becomes a Graph. Each source has its own file."""
