"""Step graphs: joint tracing of a block's forward and backward."""
