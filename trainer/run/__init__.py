"""A training run: the trainer, its tasks, rollouts, progress and resume."""
