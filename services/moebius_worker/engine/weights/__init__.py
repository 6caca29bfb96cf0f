"""A checkpoint's weights: containers' readers, families' layouts, schemes of quantisation, and the loader."""
