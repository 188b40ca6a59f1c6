"""Speed, memory and error on this device, with random inputs: of whole training steps, and of one block with experts.

What is compared is timed in turn in one process, because a card's clock moves with its temperature and power. Inputs
are random, never constant: zeros run faster than real values.
"""
