"""HTTP dialects: translation between a client's request and a `Generation`, and back."""
