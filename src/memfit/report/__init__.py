"""Timelines, frontiers and plans as text, JSON, HTML and PNG: one aggregator, many renderers."""
