"""The embedded learner: merged rows to losses, gradients and a new policy version."""
