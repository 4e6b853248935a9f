"""The embedded engine: continuous batching over the learner's own weights."""
