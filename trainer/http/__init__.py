"""What every HTTP server of ours has in common: listening, keys, and bounds on what a client may do to it."""
