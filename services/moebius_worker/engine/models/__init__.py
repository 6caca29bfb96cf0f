"""Model families, one file each, written from shared layers."""
