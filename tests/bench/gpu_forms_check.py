import itertools, sys, torch
from tests.bench.gpu_experts import *
from tests.kernels.triton.matrices import FORMATS
from concurrent.futures import ThreadPoolExecutor
part, of = int(sys.argv[1]), int(sys.argv[2])
SHAPES["tiny"] = Shape(6, 2, 512, 256)
T8 = ExpertTiling(Tiling(8, 64, 128), Tiling(8, 64, 128, splits=2))
T8B = ExpertTiling(Tiling(8, 64, 256, 4, 3), Tiling(8, 32, 256, 2, 3))
T64 = ExpertTiling(Tiling(64, 64, 64, 4, 3), Tiling(64, 128, 64, 4, 3, swap=False))
T128 = ExpertTiling(Tiling(128, 64, 64, 8, 3, swap=False), Tiling(128, 64, 128, 8, 3))
jobs = [(n, t, c) for n in FORMATS for t, c in ((1, T8), (9, T8B), (200, T64), (300, T128))]
for name, tokens, tiling in jobs[part::of]:
    w = make(FORMATS[name], SHAPES["tiny"], 1)[0]
    try:
        e = error(w, SHAPES["tiny"], tokens, tiling)
    except Exception as problem:
        print("FAIL", name, tokens, str(problem)[-200:], flush=True); continue
    if not e < 6e-3: print("WRONG", name, tokens, e, flush=True)
    elif tokens in (9,300): print(f"{name} {tokens} {e:.1e}", end="; ", flush=True)
