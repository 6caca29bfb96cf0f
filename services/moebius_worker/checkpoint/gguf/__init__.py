"""GGUF files: header, metadata told as a Hugging Face config, names of tensors, tokenizer. No torch."""
