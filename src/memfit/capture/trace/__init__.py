"""A model and a call -> one traced graph of forward and backward."""
