"""Who clients are: API keys, of which only hashes are kept, in a file that can change at any time."""
