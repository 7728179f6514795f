"""One operation per file: a reference in plain torch, a fused form, and the choice between them."""
