"""Checkpoints: everything that training changes, written so that any layout can read it. `docs/reliability.md`."""
