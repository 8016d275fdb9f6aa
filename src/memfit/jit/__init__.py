"""Numba behind one decorator: loops over arrays as machine code, in whichever room they are written."""
