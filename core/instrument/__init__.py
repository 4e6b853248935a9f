"""Tracing a program without code: adapters are switched on as their frameworks are imported."""
