import itertools, sys, torch
from tests.bench.gpu_experts import *
from tests.kernels.triton.matrices import FORMATS
from concurrent.futures import ThreadPoolExecutor

part, of = int(sys.argv[1]), int(sys.argv[2])
SHAPES["tiny"] = Shape(6, 2, 512, 256)
DEEP = Tiling(8, 16, 256, 4, 3, depth=4)
T8B = ExpertTiling(Tiling(8, 64, 256, 4, 3), Tiling(8, 32, 128, 2, 3, splits=2))
T64 = ExpertTiling(Tiling(64, 64, 64, 4, 3), Tiling(64, 128, 64, 4, 3))
T128 = ExpertTiling(Tiling(128, 64, 128, 4, 2), Tiling(128, 128, 64, 8, 3))
jobs = [
    (n, t, c) for n in FORMATS for t, c in ((1, ExpertTiling(DEEP, DEEP)), (9, T8B), (200, T64), (300, T128))
]
worst = 0
for name, tokens, tiling in jobs[part::of]:
    w = make(FORMATS[name], SHAPES["tiny"], 1)[0]
    try:
        e = error(w, SHAPES["tiny"], tokens, tiling)
    except Exception as problem:
        print("FAIL", name, tokens, str(problem)[-200:], flush=True)
        continue
    if not e < 6e-3:
        print("WRONG", name, tokens, e, flush=True)
    worst = max(worst, e)
print(f"worst {worst:.1e}", end="; ", flush=True)
