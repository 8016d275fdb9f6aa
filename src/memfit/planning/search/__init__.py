"""The portfolio `auto`: a first plan, then searches that make it faster until the time is over."""
