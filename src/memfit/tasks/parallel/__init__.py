"""Schedules for several processors."""
