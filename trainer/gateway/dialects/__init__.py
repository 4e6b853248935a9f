"""The HTTP APIs that the gateway speaks, each a package of one shape: `body` reads, `answer` and `stream` reply."""
