"""Memory for agents: a store of entries, the ranks by which they are found and kept, and the founding guide's names."""
