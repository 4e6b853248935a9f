"""Child processes: our own, started by `Child` and called through `Peer`, and untrusted ones behind a `Sandbox`."""
