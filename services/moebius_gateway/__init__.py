"""The gateway: OpenAI HTTP in, worker protocol out. Owns text, and each request until its last token."""
