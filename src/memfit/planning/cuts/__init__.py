"""The cut linear program: which values to keep across which moments, with a proven bound."""
