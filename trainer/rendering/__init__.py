"""Messages to token ids and back: chat templates, tool calls, and exact continuation of a conversation."""
