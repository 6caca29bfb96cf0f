"""Who owns which page of the KV cache: integers only, the tensors live in the runner."""
