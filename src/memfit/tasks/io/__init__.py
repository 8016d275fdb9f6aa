"""Less memory than any order needs: what to write out and read back."""
