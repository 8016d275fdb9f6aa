"""What a tape can record, one family of operations per file."""
