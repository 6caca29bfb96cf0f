"""Between text and token ids: chat template, tokenizer, incremental detokenizer, stop strings."""
