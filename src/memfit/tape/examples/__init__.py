"""Networks and exercises on the tape."""
