"""The HTTP APIs that the gateway speaks: Chat Completions, Responses, Anthropic Messages."""
