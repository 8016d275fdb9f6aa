"""Code generators, one adapter each."""
