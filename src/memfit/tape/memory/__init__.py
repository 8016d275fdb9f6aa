"""Where the bytes of a program's buffers come from, and how many there are."""
