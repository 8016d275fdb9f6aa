"""The widest block of a step, run slice by slice of the batch."""
