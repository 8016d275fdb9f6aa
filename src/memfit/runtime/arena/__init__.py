"""One step's allocations at planned offsets inside one block of device memory."""
