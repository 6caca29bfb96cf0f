"""Quantisation dialects, one file each: which form a weight is stored in, and where its parts are.

A dialect decides for each module which layout it has (`layout_of`); a layout knows the tensors. Weights that
are stored several in one tensor, as gpt-oss's experts are, have been split before a scheme sees them: their
parts then have the names `...experts.3.gate_proj.weight_blocks` and `weight_scales`.
"""
