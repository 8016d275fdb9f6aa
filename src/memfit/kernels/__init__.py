"""What memfit's own ops run."""
