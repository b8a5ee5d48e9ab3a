"""Where the milliseconds before a first token go: 2,032 cached tokens and 48 new ones.

    python scratch/first_token.py            # GPU, llama-3.1-8b shape: stages by the host's clock and by CUDA events
    python scratch/first_token.py --cpu      # tiny model, graphs that run again: the host's own work only (cProfile)
"""
import argparse, collections, cProfile, functools, pstats, sys, time
sys.path.insert(0, ".")
import numpy as np
import torch
from specdec import SamplingParams

ap = argparse.ArgumentParser()
ap.add_argument("--cpu", action="store_true")
ap.add_argument("--layers", type=int, default=32)
ap.add_argument("--repeats", type=int, default=12)
ap.add_argument("--at-once", type=int, default=32)
ap.add_argument("--trace", action="store_true")
args = ap.parse_args()
K, PREFIX, OWN = 3, 2048, 32
began = time.perf_counter()
if args.cpu:
    sys.path[:0] = ["tests"]
    import pytest
    from tests.sampled_rounds import kernels_by_reference
    from tests.specdec.execution.test_graphs import record_on_cpu, compile_nothing, FixedPlaceBackend
    from fakes import backend_of_ours, launch_ahead, eagle3_head, TINY, LetterTokenizer
    from transformers import LlamaConfig, LlamaForCausalLM
    from specdec.model import SpeculativeModel
    torch.set_num_threads(1)
    mp = pytest.MonkeyPatch(); record_on_cpu(mp); compile_nothing(mp); by_reference = kernels_by_reference(); by_reference.__enter__()
    target = LlamaForCausalLM(LlamaConfig(**{**TINY, "vocab_size": 64, "num_hidden_layers": args.layers, "max_position_embeddings": 4096})).eval()
    head = eagle3_head(target)
    with backend_of_ours(FixedPlaceBackend(torch.device("cpu"))):
        model = SpeculativeModel.from_pretrained(target, head, tokenizer=LetterTokenizer(), cuda_graphs=True, num_speculative_tokens=K,
            max_num_seqs=2, max_num_batched_tokens=512, page_size=16, kv_cache_tokens=8192, max_model_len=PREFIX + OWN + 2 * K + 32, enable_prefix_caching=True)
    launch_ahead(model)
    vocab = 64
else:
    from benchmarks.bench_serving import wrapped
    from benchmarks.shapes import random_pair
    from benchmarks.synthetic import DrawnAcceptance, decide
    place = torch.device("cuda")
    pair = random_pair("llama-3.1-8b", torch.bfloat16, place)
    model = wrapped(pair, K, "on", True, max_model_len=PREFIX + OWN + 2 * K + 32, max_num_seqs=args.at_once)
    vocab = pair.target.config.vocab_size
    decide(model, DrawnAcceptance(0.8, vocab, np.random.default_rng(0), place))
print(f"start {time.perf_counter() - began:.1f} s", flush=True)

marks, on, t0 = [], [False], [0.0]
e0 = [None]
cuda = not args.cpu

def mark(name, event=False):
    if on[0]:
        e = None
        if event and cuda:
            e = torch.cuda.Event(enable_timing=True); e.record()
        marks.append((name, time.perf_counter() - t0[0], e))

def staged(owner, name, label, event=False):
    real = getattr(owner, name)
    @functools.wraps(real)
    def run(*a, **k):
        mark(label + " {", event)
        out = real(*a, **k)
        mark(label + " }", event)
        return out
    setattr(owner, name, run)

import specdec.generation as G, specdec.engine.engine as E, specdec.engine.launcher as L, specdec.execution.graphs as X
import specdec.engine.sharing as S
from specdec.engine.scheduler import Scheduler
from specdec.engine.prefixes import Prefixes
from specdec.engine.lookahead import Lookahead
from specdec.execution.readback import HostReads
from specdec.execution.ragged import RaggedPrefill, RaggedTarget
from specdec.target.live import LiveModel
staged(LiveModel, "check", "live.check")
staged(G, "submissions", "submissions")
staged(E.Engine, "check", "engine.check")
staged(E.Engine, "check_weights", "check_weights")
staged(E.Engine, "submit", "engine.submit")
staged(S.SharedEngine, "submit", "shared.submit")
staged(Prefixes, "find", "prefixes.find")
staged(Scheduler, "schedule", "schedule")
staged(L, "target_arrays", "target_arrays")
staged(X.GraphExecutor, "send", "executor.send")
staged(RaggedTarget, "logits", "target (33 segments)", True)
staged(X.GraphExecutor, "_decide_ragged", "decide", True)
staged(HostReads, "start", "read queued", True)
staged(X, "ahead_inputs", "ahead_inputs")
staged(RaggedPrefill, "run", "draft prefill", True)
staged(Lookahead, "before_read", "reserve")
staged(HostReads, "finish", "read waited for")
staged(L.Launcher, "draft_steps", "draft steps", True)
staged(Lookahead, "before_commit", "next verification", True)
staged(E, "commit", "commit")
staged(L.Launcher, "after", "after", True)
staged(E.Engine, "_report", "report")

rng = np.random.default_rng(0)
common = rng.integers(0, vocab, PREFIX).tolist()

def once(cached, record=False):
    prompt = common + rng.integers(0, vocab, OWN).tolist()
    params = SamplingParams(max_new_tokens=2 * K + 3, ignore_eos=True, cache_prefix=cached)
    if cuda:
        torch.cuda.synchronize()
    marks.clear(); t0[0] = time.perf_counter(); on[0] = record
    if cuda:
        e0[0] = torch.cuda.Event(enable_timing=True); e0[0].record()
    mark("call")
    first = 0.0
    for update in model.stream([prompt], params):
        if not first:
            first = time.perf_counter() - t0[0]
            mark("first token"); on[0] = False
    return first

for _ in range(3):
    once(True), (cuda and once(False))
plain = [(once(True), cuda and once(False)) for _ in range(args.repeats)]
print("plain, cached ms", np.round(np.array(plain)[:, 0] * 1e3, 2), "uncached", np.round(np.array(plain)[:, 1] * 1e3, 2))
med = np.median(np.array(plain), 0) * 1e3
print(f"median cached {med[0]:.2f} ms, uncached {med[1]:.2f} ms, ratio {med[0] / max(med[1], 1e-9):.4f}", flush=True)
table, order = collections.defaultdict(list), []
for _ in range(args.repeats):
    once(True, True)
    if cuda:
        torch.cuda.synchronize()
    seen = collections.Counter()
    for name, at, event in marks:
        key = (name, seen[name]); seen[name] += 1
        if key not in order: order.append(key)
        table[key].append((at * 1e6, e0[0].elapsed_time(event) * 1e3 if event is not None else np.nan))
print(f"{'':34s} host us   device us   (since the call; medians of {args.repeats})")
for key in order:
    if len(table[key]) < args.repeats // 2: continue
    host, dev = np.median(np.array(table[key]), 0)
    print(f"{key[0]:30s} {key[1] or '':3} {host:9.0f}   {'' if np.isnan(dev) else f'{dev:9.0f}'}")
if args.cpu:
    profile = cProfile.Profile()
    real = L.Launcher.first
    import types
    for _ in range(30):
        prompt = common + rng.integers(0, vocab, OWN).tolist()
        params = SamplingParams(max_new_tokens=2 * K + 3, ignore_eos=True)
        stream = None
        X_verify = X.GraphExecutor.verify
        profile.enable(); s = model.stream([prompt], params); next(s); profile.disable()
        for _u in s: pass
    pstats.Stats(profile).sort_stats("cumtime").print_stats(70)
if args.trace and cuda:
    from torch.profiler import ProfilerActivity, profile as prof
    with prof(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
        for _ in range(4):
            params = SamplingParams(max_new_tokens=2 * K + 3, ignore_eos=True)
            s = model.stream([common + rng.integers(0, vocab, OWN).tolist()], params); next(s); torch.cuda.synchronize(); s.close(); torch.cuda.synchronize()
    import json, tempfile, os
    path = os.path.join(tempfile.mkdtemp(), "t.json"); p.export_chrome_trace(path)
    ev = [e for e in json.load(open(path))["traceEvents"] if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    by = collections.defaultdict(lambda: [0, 0.0])
    for e in ev:
        by[e["name"][:100]][0] += 1; by[e["name"][:100]][1] += e["dur"]
    print("kernels of 4 first tokens with what was launched behind them: us, count, name")
    for n, (c, d) in sorted(by.items(), key=lambda kv: -kv[1][1])[:30]:
        print(f"{d:9.0f} {c:6d} {n}")
