"""Running a program: executor, optimizer, trainer, and what training shows."""
