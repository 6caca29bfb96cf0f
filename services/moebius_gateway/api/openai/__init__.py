"""OpenAI: chat completions and plain completions."""
