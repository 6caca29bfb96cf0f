"""What a checkpoint is, without its weights: location, config, tokenizer files. No torch."""
