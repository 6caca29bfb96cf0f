"""Who owns which page and state slot of the caches: integers only, the tensors live in the runner."""
