"""Runs programs against tests: each program, and what judges it, in a sandbox of its own."""
