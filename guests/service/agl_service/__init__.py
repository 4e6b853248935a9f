"""One server that trains and serves a policy, and the client that runs agents against it."""
