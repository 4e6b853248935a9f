"""One package per framework, all of one shape: a `Tracer` turns its hooks into spans, `wrap` makes agents trainable."""
