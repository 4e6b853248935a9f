"""agl trains the LLM agents that people already have."""
