"""What to train -> which forms -> which plan -> ready to run: the one place that strings the rooms together."""
