"""A traced graph -> Captured: storages, ops and the calls that run them."""
