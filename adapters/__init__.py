"""One package per framework, all of one shape: `<Framework>Tracer` turns its hooks into spans, `wrap` makes its agents trainable."""
