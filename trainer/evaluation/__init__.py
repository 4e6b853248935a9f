"""How good a policy is on tasks it was not trained on: success with its error, comparisons, reports."""
