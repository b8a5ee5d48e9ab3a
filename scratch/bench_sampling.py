"""Sampled rows' kernels, old and new, in CUDA graphs between matmuls (as in a round): µs beyond the matmuls alone.

    python scratch/bench_sampling.py          # <= 45 s
"""
import sys, time
sys.path.insert(0, ".")
import torch
import scratch.old.draws_kernel as old_draws, scratch.old.filters_kernel as old_filters
import scratch.mid.draws_kernel as mid_draws
import specdec.ops.draws_kernel as draws, specdec.ops.filters_kernel as filters
from specdec.ops.draws import DraftPlaces, Proposal, draw_drafts, accept_drafts, inverse_map
from specdec.ops.filters import Filtered, filter_rows
from specdec.ops.argmax import greedy_ids
from specdec.requests.sampling import SamplingTensors

D, V, VD = torch.device("cuda"), 128_256, 32_000
began = time.perf_counter()
torch.manual_seed(0)
W = torch.randn(4096, 32_768, device=D, dtype=torch.bfloat16)  # 268 MB: out of L2, 60 µs
X = torch.randn(8, 4096, device=D, dtype=torch.bfloat16)

def params(rows, kind):
    on = torch.ones(rows, device=D)
    t = on * 0.8
    if kind == "half": t[1::2] = 0
    if kind == "greedy": t[:] = 0
    return SamplingTensors(True, t, torch.zeros(rows, dtype=torch.int32, device=D), on * 0.95, on * 0)

def timed(launch, n=8, replays=12):
    for _ in range(2): launch()
    def graph(f):
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for _ in range(n):
                X @ W
                f()
        return g
    with_, without = graph(launch), graph(lambda: None)
    out = []
    for g in (with_, without):
        g.replay(); torch.cuda.synchronize()
        best = []
        for _ in range(5):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            for _ in range(replays): g.replay()
            b.record(); torch.cuda.synchronize()
            best.append(a.elapsed_time(b) * 1e3 / replays / n)
        out.append(sorted(best)[1])
    return out[0] - out[1]

class Case:
    def __init__(self, rows, n, kind, std):
        torch.manual_seed(1)
        self.rows, self.n, self.sampling = rows, n, params(rows, kind)
        self.known = torch.arange(VD, device=D) * 4
        self.logits = (torch.randn(rows * (n + 1), V, device=D) * std).bfloat16()
        self.head = (torch.randn(rows, n, VD, device=D) * std).bfloat16()
        self.index = torch.arange(rows * (n + 1), device=D).view(rows, n + 1)
        self.uniform, self.accept, self.after = (torch.rand(rows, w, device=D) for w in (2 * n, n, n + 1))
        self.num = torch.full((rows,), n, device=D)
        self.greedy, self.peak = greedy_ids(self.logits), greedy_ids(self.head[:, 0])
        self.packed = torch.zeros(rows, 2 * n + 2, dtype=torch.int64, device=D)
        self.kept = torch.zeros(rows, n, VD, dtype=torch.bfloat16, device=D)
        self.ids, self.drafts = self.peak.clone(), torch.zeros(rows, n, dtype=torch.int64, device=D)
        self.accepted = torch.zeros(rows, dtype=torch.int64, device=D)
        self.of_q, self.of_p = Filtered.empty(rows, n, device=D), Filtered.empty(rows * (n + 1), device=D)
        self.of_q.stats.fill_(1); self.of_p.stats.fill_(1)
        self.offsets = self.known - torch.arange(VD, device=D)
        self.inverse = inverse_map(self.known, V)
        self.sources = torch.arange(rows, device=D)
        p = self.sampling
        self.parameters = (p.temperature, p.top_k, p.top_p, p.min_p)

    def old_step(self):  # a later step: no begin()
        logits = self.head[:, 0]
        self.ids.copy_(self.peak)
        self.kept[:, 0].copy_(logits)
        old_draws.launch_drafts(logits, self.ids, self.parameters, self.uniform, 0, self.of_q.stats[:, 0], self.accepted)
        self.drafts[:, 0].copy_(self.ids + self.offsets[self.ids])

    def mid_step(self):  # copies folded in, two launches for a draw
        self.ids.copy_(self.peak)
        mid_draws.launch_drafts(self.head[:, 0], self.ids, self.parameters, self.uniform, 0, self.of_q.stats[:, 0], self.accepted,
                                (self.kept[:, 0], self.drafts[:, 0], self.known, None))

    def new_step(self):
        self.ids.copy_(self.peak)
        draw_drafts(self.head[:, 0], self.ids, self.sampling, self.uniform, 0, self.of_q.step(0), num_accepted=self.accepted,
                    places=DraftPlaces(self.kept[:, 0], self.drafts[:, 0], self.known))

    def old_decide(self):
        rows = self.index.reshape(-1)
        old_filters.launch_filters(self.logits, self.greedy[rows], self.parameters, self.of_p.stats, rows)
        old_draws.launch_acceptance(self.logits, self.inputs(), self.accept, self.after, self.packed, (self.kept, self.of_q.stats, self.inverse, self.sources))

    def inputs(self):
        return (self.index, self.of_p.stats, self.parameters[0], self.parameters[3], self.num)

    def new_decide(self):
        filter_rows(self.logits, self.greedy, self.sampling, self.of_p, index=self.index.reshape(-1))
        accept_drafts(self.logits, self.index, self.of_p, self.sampling, self.num, self.accept, self.after, self.packed,
                      Proposal(self.kept, self.of_q, self.inverse, self.sources))

    def state(self):
        on = self.sampling.temperature > 0
        p = self.of_p.stats.view(self.rows, self.n + 1, 4)[on]
        return [x.clone() for x in (self.ids, self.drafts[on], self.kept[on], self.of_q.stats[on], p, self.packed[on])]

def same_bits():
    wrong = 0
    for rows, n, kind, std in ((8, 3, "all", 1.0), (32, 5, "half", 1.0), (8, 5, "half", 6.0), (1, 3, "all", 0.02)):
        states = []
        for which in ("old", "new"):
            c = Case(rows, n, kind, std)
            for k in range(n):  # every step by its own logits
                c.peak = greedy_ids(c.head[:, k].contiguous()); c.head[:, 0].copy_(c.head[:, k].clone())
                getattr(c, which + "_step")()
                c.kept[:, k].copy_(c.kept[:, 0].clone()); c.of_q.stats[:, k].copy_(c.of_q.stats[:, 0].clone()); c.drafts[:, k].copy_(c.drafts[:, 0].clone())
            c.packed[:, n + 2:] = c.drafts
            getattr(c, which + "_decide")()
            states.append(c.state())
        odd = [name for name, a, b in zip(("ids", "drafts", "kept", "of_q", "of_p", "packed"), *states) if not torch.equal(a, b)]
        wrong += len(odd)
        if odd: print(rows, n, kind, std, odd, flush=True)
    print("same bits, old and new:", "yes" if not wrong else f"NO, {wrong} tensors differ", flush=True)

class tiling:
    def __init__(self, module, **values): self.module, self.values = module, values
    def __enter__(self):
        self.before = {k: getattr(self.module, k) for k in self.values}
        for k, v in self.values.items(): setattr(self.module, k, v)
    def __exit__(self, *_):
        for k, v in self.before.items(): setattr(self.module, k, v)

same_bits()
def short_draws():
    """The one-program kernel: the same ids, stats within rounding."""
    for std, kind in ((1.0, "all"), (6.0, "half"), (0.02, "all"), (0.0, "all")):
        a, b = Case(32, 3, kind, std), Case(32, 3, kind, std)
        a.new_step()
        with tiling(draws, _SHORT=32_768): b.new_step()
        on = a.sampling.temperature > 0
        gap = ((a.of_q.stats[on, 0] - b.of_q.stats[on, 0]).abs() / a.of_q.stats[on, 0].abs().clamp(min=1)).max()
        print(f"one program a row, std {std}: ids equal {int((a.ids == b.ids).sum())} of 32, drafts {torch.equal(a.drafts[on, 0], b.drafts[on, 0])}, "
              f"copy {torch.equal(a.kept[on, 0], b.kept[on, 0])}, stats within {float(gap):.1e}", flush=True)

short_draws()
print("draft step: three launches fewer (one program a row), us: now | 32 warps | 16 warps")
for std in (1.0, 6.0):
    for rows in (1, 8, 32, 128):
        c = Case(rows, 3, "all", std); half = Case(rows, 3, "half", std)
        out = [timed(c.old_step), timed(c.new_step)]
        for share in (1024, 2048):
            with tiling(draws, _SHORT=32_768, _SHORT_SHARE=share): out += [timed(c.new_step), timed(half.new_step)]
        print(f"std {std} {rows:3d} rows: old {out[0]:6.1f} now {out[1]:6.1f} | 32 warps {out[2]:6.1f} (half greedy {out[3]:6.1f}) | 16 warps {out[4]:6.1f} ({out[5]:6.1f})", flush=True)
print(f"{time.perf_counter() - began:.0f} s")
print("old and new, µs: draft step (Vd 32,000) | decision, beside the matmuls (60 µs) around them")
for std in (1.0, 6.0):
    for rows in (8, 32):
        for kind in ("all", "half", "greedy"):
            if std == 6.0 and kind != "all": continue
            c = Case(rows, 3, kind, std); c5 = Case(rows, 5, kind, std)
            line = [timed(c.old_step), timed(c.mid_step), timed(c.new_step), timed(c.old_decide), timed(c.new_decide), timed(c5.old_decide), timed(c5.new_decide)]
            print(f"std {std} {rows:3d} rows {kind:6s} step {line[0]:6.1f} -> {line[1]:6.1f} (two launches) -> {line[2]:6.1f} (one)   K=3 {line[3]:6.1f} -> {line[4]:6.1f}   K=5 {line[5]:6.1f} -> {line[6]:6.1f}", flush=True)
print(f"{time.perf_counter() - began:.0f} s")
print("tilings (all rows sampled, std 1): step, K=3, K=5 at 8 rows | at 32 rows")
TRY = [(draws, dict(_PART=p, _WARPS=w)) for p, w in ((1024, 4), (4096, 4), (4096, 8), (1024, 2))]
TRY += [(draws, dict(_PICK_WARPS=4)), (draws, dict(_PICK_WARPS=16)), (filters, dict(_LIST_WARPS=8)), (filters, dict(_LIST_WARPS=2)),
        (filters, dict(_PROGRAMS=1024)), (filters, dict(_PROGRAMS=4096)), (filters, dict(_PROGRAMS=1 << 20))]
cases = [(Case(rows, 3, "all", 1.0), Case(rows, 5, "all", 1.0)) for rows in (8, 32)]
def line():
    return " | ".join(f"{timed(a.new_step, replays=6):6.1f} {timed(a.new_decide, replays=6):6.1f} {timed(b.new_decide, replays=6):6.1f}" for a, b in cases)
print(f"{'as it is':40s} {line()}", flush=True)
for module, values in TRY:
    with tiling(module, **values):
        print(f"{module.__name__.split('.')[-1] + ' ' + str(values):40s} {line()}", flush=True)
print(f"{time.perf_counter() - began:.0f} s")
from torch.profiler import ProfilerActivity, profile
import collections
for rows in (8, 32):
    a, b = Case(rows, 3, "all", 1.0), Case(rows, 5, "all", 1.0)
    for name, f in (("old step", a.old_step), ("mid step", a.mid_step), ("new step", a.new_step), ("old decide K=3", a.old_decide), ("new decide K=3", a.new_decide), ("new decide K=5", b.new_decide)):
        def once():
            X @ W
            f()
        for _ in range(3): once()
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            for _ in range(10): once()
            torch.cuda.synchronize()
        by = collections.Counter()
        for e in p.events():
            if e.device_type == torch.autograd.DeviceType.CUDA: by[e.name[:48]] += e.device_time_total
        print(f"{rows} rows {name}: " + ", ".join(f"{n} {t / 10:.1f}" for n, t in by.most_common(12)), flush=True)
print(f"{time.perf_counter() - began:.0f} s")
