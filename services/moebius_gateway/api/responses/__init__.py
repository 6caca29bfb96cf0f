"""OpenAI: responses."""
