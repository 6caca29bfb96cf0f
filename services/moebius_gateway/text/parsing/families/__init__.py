"""One file a family: what its models write, as data; taken from the chat templates that they ship."""
