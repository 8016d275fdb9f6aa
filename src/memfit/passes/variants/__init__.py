"""Other implementations of ops, offered to the planner."""
