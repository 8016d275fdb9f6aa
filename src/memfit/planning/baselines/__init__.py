"""Published and simple planners, one per file: what `auto` is measured against."""
