"""What a person reads of a run: explain, curves, span trees, exports."""
