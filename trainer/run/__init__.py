"""A training run: the trainer, its tasks, rollouts and resume."""
