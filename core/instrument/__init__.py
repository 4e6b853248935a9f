"""Tracing a program that knows nothing of agl: adapters are switched on as their frameworks are imported."""
