"""Memory, time, idle share and cost of a training run, before the machines are rented: `agl plan`."""
