"""Exports rollouts and traces of a store: to files (`to_files`), or to a tracing backend by OTLP (`otlp`)."""
