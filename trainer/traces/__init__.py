"""Which recorded calls are imitated: selected from stores or from rollouts in memory, with the student's tokens."""
