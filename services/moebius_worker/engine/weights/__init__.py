"""A checkpoint's weights: readers of containers, layouts of families, schemes of quantisation, and the loader."""
