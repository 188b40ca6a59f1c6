"""Checkpoints: saved at any instant, read under any layout, believed only when they are whole."""
