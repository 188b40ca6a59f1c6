"""Proofs about graphs: structure after every pass, numbers before and after it."""
