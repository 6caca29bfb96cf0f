"""Forms in which weight matrices are stored, one file each; kernels read them as they are."""
