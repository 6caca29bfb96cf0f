"""The `moebius` command."""
