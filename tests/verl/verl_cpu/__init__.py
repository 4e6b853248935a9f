"""verl and vLLM on CPU: a platform and a worker extension for their registries, and the settings that go with them."""
