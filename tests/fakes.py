"""Stand-ins for weights and files: tiny random models, heads that guess right about half of the time, a tokenizer."""

from __future__ import annotations

import copy
import functools
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import settings
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from attention.backends.flashinfer import mla_plan
from attention.backends.reference import TorchBackend, attend
from attention.batch.host import HostBatch, rows_batch, slots_of
from attention.batch.metadata import single_batch_arena, stage
from attention.cache.kv_cache import CacheGroup, write
from attention.cache.pages import PageAllocator
from attention.checking import CHECKS
from attention.runner import GroupRunner
from attention.spec import AttentionSpec
from drafters.base import Head
from drafters.loops.base import Attend, LoopSize
from drafters.loops.chain import ChainLoop
from specdec.loading import targets
from specdec.loading.checkpoint import find_checkpoint
from specdec.selftest.twin import enlarge as enlarge

LETTERS = string.ascii_lowercase + string.ascii_uppercase + string.digits + " ."
VOCAB = len(LETTERS)
EOS = 63
CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""The sizes of a tiny model, as most configurations name them."""


def free_pages(allocator: PageAllocator) -> list[int]:
    """A copy of the free list."""
    return list(vars(allocator)["_free"])


def idle_pages(allocator: PageAllocator) -> list[int]:
    """Registered pages that no row holds, the next one to be evicted first."""
    return list(vars(allocator)["_idle"])


@contextmanager
def check_mode(enabled: bool) -> Iterator[None]:
    """Turn the validators on or off inside a block."""
    before = CHECKS.on
    CHECKS.on = enabled
    try:
        yield
    finally:
        CHECKS.on = before


def load_target(name: Any, dtype: torch.dtype | str, device: torch.device) -> PreTrainedModel:
    """The target that `specdec.loading.targets.load_target` loads from a folder, without how its weights are stored."""
    return targets.load_target(find_checkpoint(name), dtype, device)[0]


def examples(whole: int) -> int:
    """`max_examples` of a property that the whole suite tries on `whole` examples: fewer by the profile that is loaded.

    `make test-quick` has a quarter of them (tests/conftest.py).
    """
    return max(whole * settings.default.max_examples // 100, 1)


class LetterTokenizer:
    """One character a token; `EOS` is a special token."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [LETTERS.index(c) for c in text]}

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        special = "" if skip_special_tokens else "<end>"
        return "".join(special if t == EOS else LETTERS[t % VOCAB] for t in token_ids)


def copied(module: Any, memo: dict[int, Any] | None = None) -> Any:
    """As `copy.deepcopy` of a module, in a third of the time: most of what a module holds is an empty dictionary."""
    memo = {} if memo is None else memo
    if id(module) in memo:
        return memo[id(module)]
    memo[id(module)] = new = object.__new__(type(module))
    for name, value in vars(module).items():
        if name == "_modules":
            vars(new)[name] = {k: None if v is None else copied(v, memo) for k, v in value.items()}
        elif isinstance(value, dict) and not value:
            vars(new)[name] = type(value)()
        else:
            vars(new)[name] = copy.deepcopy(value, memo)
    return new


@functools.cache
def _llama(vocab_size: int, seed: int, context: float) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**{**TINY, "vocab_size": vocab_size})).eval()
    enlarge(model, seed)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(context)
            layer.mlp.down_proj.weight.mul_(context)
    return model


def tiny_llama(vocab_size: int = VOCAB, seed: int = 0, context: float = 0.03) -> LlamaForCausalLM:
    """A fresh random Llama: 4 layers, Hq 4, Hkv 2, D 16. `context` weighs attention against the last token."""
    return copied(_llama(vocab_size, seed, context))


def bigram_logits(model: PreTrainedModel) -> torch.Tensor:
    """[V, V]: what the model says after each token alone."""
    vocab = model.get_input_embeddings().weight.shape[0]
    with torch.no_grad():
        return model(torch.arange(vocab)[:, None], use_cache=False).logits[:, 0]


class TableHead(torch.nn.Module):
    """A head that knows the target's bigrams, disturbed by what it attends to.

    So it is right about half of the time, and its drafts depend on the true hidden states at every position, through a
    KV cache of its own. Satisfies `drafters.base.Head`. The block output x is [one-hot token, attention output].
    """

    def __init__(
        self,
        table: torch.Tensor,
        aux_layers: tuple[int, ...],
        width: int,
        disturbance: float,
        target_ids: torch.Tensor,
        dim: int = 8,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        vocab = table.shape[0]
        self.attention_specs = (AttentionSpec(2, 1, dim, dim, scale=0.2),)
        self.aux_layers, self.hidden_size, self.draft_vocab_size = aux_layers, vocab + 2 * dim, len(target_ids)
        self.target_ids, self.table, self.vocab = target_ids, table[:, target_ids], vocab

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.fuse_weight = random(len(aux_layers) * width, self.hidden_size) / (len(aux_layers) * width) ** 0.5
        self.qkv = random(self.hidden_size + vocab, 4 * dim) / 4
        self.mix = random(2 * dim, len(target_ids)) * disturbance

    def fuse(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        return aux_hidden_states @ self.fuse_weight

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        one_hot = torch.nn.functional.one_hot(token_ids, self.vocab).to(hidden.dtype)  # [T, V]
        rotated = one_hot * torch.cos(positions[:, None] * 0.3).to(hidden.dtype)
        qkv = torch.cat([rotated, hidden], -1) @ self.qkv  # [T, 4·dim]
        query, key, value = qkv.unflatten(-1, (4, -1)).split((2, 1, 1), dim=1)
        return torch.cat([one_hot, attend(0, query, key, value).flatten(1)], -1)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : self.vocab] @ self.table + x[:, self.vocab :] @ self.mix

    def feedback(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return self.target_ids[draft_ids]

    def draft_loop(self, limits: LoopSize) -> ChainLoop:
        return ChainLoop(self)


def table_head(
    model: PreTrainedModel,
    disturbance: float = 0.4,
    aux_layers: tuple[int, ...] = (1, 2, 4),
    known: Iterable[int] = (),
    dim: int = 8,
) -> TableHead:
    """A TableHead for `model`, on the draft vocabulary `known` (default: the whole); dim: of its attention heads."""
    table = bigram_logits(model)
    ids = torch.tensor(sorted(known) or range(table.shape[0]))
    return TableHead(table, aux_layers, model.config.get_text_config().hidden_size, disturbance, ids, dim)


def eagle3_spec(**changes: Any) -> Any:
    """The `Eagle3Spec` of a very small head, with these fields changed."""
    from drafters.eagle3.spec import Eagle3Spec

    spec = Eagle3Spec(
        hidden_size=16,
        target_hidden_size=16,
        intermediate_size=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        vocab_size=40,
        draft_vocab_size=11,
        aux_layers=(1, 2, 4),
    )
    return replace(spec, **changes)


def eagle3_head(
    model: PreTrainedModel, seed: int = 1, draft_vocab_size: int | None = None, aux_layers: tuple[int, ...] = (1, 2, 3)
) -> Head:
    """A random EAGLE-3 head for a tiny model."""
    from drafters.eagle3.head import Eagle3Head
    from drafters.eagle3.spec import Eagle3Spec

    config = model.config
    vocab = config.vocab_size
    known = draft_vocab_size or vocab
    spec = Eagle3Spec(
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=vocab,
        draft_vocab_size=known,
        aux_layers=aux_layers,
    )
    d2t = None if known == vocab else torch.arange(known) * (vocab // known - 1)
    head = Eagle3Head(spec, model.get_input_embeddings().weight, d2t=d2t).eval().requires_grad_(False)
    enlarge(head, seed)
    return head


def wrap(model: PreTrainedModel, draft: Any = None, **options: Any) -> Any:
    """A SpeculativeModel with small sizes."""
    from specdec.model import SpeculativeModel

    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "page_size": 4, "kv_cache_tokens": 400}
    return SpeculativeModel.from_pretrained(model, draft, **{"tokenizer": LetterTokenizer(), **sizes, **options})


@functools.cache
def _hf_greedy(vocab_size: int, seed: int, context: float, prompt: tuple[int, ...], new: int) -> tuple[int, ...]:
    model = _llama(vocab_size, seed, context)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=new, do_sample=False, attention_mask=torch.ones_like(ids))
    return tuple(out[0, len(prompt) :].tolist())


def hf_greedy(prompt: list[int], new: int, vocab_size: int = VOCAB, seed: int = 0, context: float = 0.03) -> list[int]:
    """What transformers' own greedy `generate` says of `tiny_llama` with the same arguments."""
    return list(_hf_greedy(vocab_size, seed, context, tuple(prompt), new))


@functools.lru_cache(maxsize=256)
def _hf_states(token_ids: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    model, ids = tiny_llama(), torch.tensor([token_ids])
    with torch.no_grad():
        return tuple(model(ids, output_hidden_states=True, use_cache=False).hidden_states)


def wrong_rounds(head: Head, completion: Any) -> list[int]:
    """Rounds of a `tiny_llama` whose drafts are not the oracle's. True states come from transformers' own forward."""
    from drafters.oracle import oracle_drafts

    ids = torch.tensor(completion.prompt_token_ids + completion.token_ids)
    wrong, bonus = [], len(completion.prompt_token_ids)
    states = _hf_states(tuple(ids.tolist()))
    with torch.no_grad():
        aux_hidden_states = torch.cat([states[layer][0] for layer in head.aux_layers], -1)
        assert completion.drafts is not None and len(completion.drafts) == len(completion.stats.rounds)
        for index, (drafts, round_) in enumerate(zip(completion.drafts, completion.stats.rounds, strict=True)):
            assert len(drafts) == round_.drafted
            if list(drafts) != oracle_drafts(head, ids[: bonus + 1], aux_hidden_states[:bonus], len(drafts)):
                wrong.append(index)
            bonus += round_.emitted
    return wrong


def random_prompts(lengths: Iterable[int], seed: int = 0, vocab_size: int = VOCAB) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def flashinfer_chunk_size(mean: int) -> int:
    """Most keys of an item by FlashInfer's rule, from the mean of keys a cluster (scheduler.cuh, MLAPlan)."""
    steps = ((8, 32), (16, 64), (32, 128), (64, 192))
    return next((n for most, n in steps if mean <= most), -(-mean // 256) * 256)


@contextmanager
def split_as_by_flashinfer() -> Iterator[None]:
    """Inside, MLA plans make KV chunks by FlashInfer's rule instead of ours."""

    def chunk_size(tiles: mla_plan.Tiles, keys: np.ndarray) -> int:
        return flashinfer_chunk_size(max(-(-int(keys.sum()) // tiles.clusters), 1))

    with patch.object(mla_plan.Tiles, "chunk_size", chunk_size), patch.object(mla_plan, "WHOLE_KEYS", 0):
        yield


def count_calls(monkeypatch: Any, owner: Any, name: str) -> list[Any]:
    """What the method was called with, from now on."""
    plain, calls = getattr(owner, name), []

    def counting(self: Any, *args: Any) -> Any:
        calls.append(args)
        return plain(self, *args)

    monkeypatch.setattr(owner, name, counting)
    return calls


def results_of(monkeypatch: Any, owner: type, name: str) -> list[Any]:
    """What the method returned, from now on."""
    plain, results = getattr(owner, name), []

    def noting(self: Any, *args: Any) -> Any:
        results.append(plain(self, *args))
        return results[-1]

    monkeypatch.setattr(owner, name, noting)
    return results


@contextmanager
def backend_of_ours(backend: Any) -> Iterator[None]:
    """Models that are wrapped inside run on `backend`, whatever is asked for."""
    with patch("specdec.loading.parts.make_backend", lambda name, device: backend):
        yield


def engine_of(wrapped: Any) -> Any:
    """The model's `Engine`, whose rounds a test steps itself."""
    return wrapped.engine


def guests_of(wrapped: Any) -> Any:
    """The `MovingRequests` of the model's engine."""
    from specdec.extensions.handoff.moving import moving_requests

    return moving_requests(engine_of(wrapped))


def late_pages(wrapped: Any) -> set[int]:
    """Pages of the target's first group that a late read may still write to."""
    reserved = guests_of(wrapped).held.reserved.values()
    return {page for own in reserved if own.settled is not None for page in own.pages[0]}


def scheduler_of(wrapped: Any) -> Any:
    """The `Scheduler` of the model's engine."""
    return engine_of(wrapped).scheduler


def launch_ahead(wrapped: Any, ahead: bool = True) -> None:
    """Whether a verification is queued after the draft loop before the host goes on, as on a GPU."""
    wrapped.engine.use(wrapped.engine.executor, queue_verification=ahead)


def run_interrupted(wrapped: Any, at: int) -> dict[int, Any]:
    """Completions of what is queued, by request id. A KeyboardInterrupt strikes at verification number `at`."""
    engine, left, ends = engine_of(wrapped), [at], dict[int, Any]()
    plain = engine.executor.verify

    def verify(*given: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return plain(*given)

    with patch.object(engine.executor, "verify", verify):
        while engine.has_work:
            try:
                updates = engine.step()
            except KeyboardInterrupt:
                updates = engine.reported
            ends |= {update.request_id: update.completion for update in updates if update.completion}
    assert left[0] < 0, "it was never struck"
    return ends


def attention_form(model: Any) -> Any:
    """The name of the attention that a transformers model runs."""
    return model.config._attn_implementation


def experts_form(model: Any) -> Any:
    """The name of the form in which a transformers model runs its experts."""
    return model.config._experts_implementation


def keep_gpu_busy(cycles: int) -> None:
    """Queue a kernel that spins for so many clock cycles: what is launched next waits for it."""
    torch.cuda._sleep(cycles)


def free_everywhere(wrapped: Any) -> bool:
    """Whether no request holds a row or a page any more, and every page has one owner."""
    from specdec.engine.scheduler import Usage

    return bool(engine_of(wrapped).usage() == Usage())


def hooks_of(module: torch.nn.Module) -> tuple[int, int]:
    """How many hooks a module has that run after its forward, and before it."""
    return len(module._forward_hooks), len(module._forward_pre_hooks)


class PagedLayer:
    """One attention layer over the torch backend, with ragged rows whose pages lie in any order.

    The keys that a row computed before are in the cache; everything else there but the null page is NaN, so a key that
    is read before it is written, or from a foreign page, shows.
    """

    SPEC = AttentionSpec(4, 2, 8, 8, scale=8**-0.5)

    def __init__(self, computed: list[int], lens: list[int], page_size: int, seed: int = 0) -> None:
        """computed, lens: [B] keys in the cache before the batch, and query tokens."""
        rows, seqs = len(lens), [n + more for n, more in zip(computed, lens, strict=True)]
        width = max(seqs) // page_size + 1
        pages = np.random.default_rng(seed).permutation(np.arange(1, rows * width + 1)).astype(np.int32)
        owned = np.arange(width) < -(-np.array(seqs) // page_size)[:, None]
        table = np.where(owned, pages.reshape(rows, width), np.int32(0))
        generator = torch.Generator().manual_seed(seed)
        self.rows = [
            [torch.randn(n, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)] for n in seqs
        ]
        self.starts, self.seed = computed, seed
        group = CacheGroup("g", (self.SPEC,), rows * width + 1, page_size)
        self._runner = GroupRunner(TorchBackend(CPU), group, torch.float64, CPU)
        layer = self._runner.layers[0]
        layer.keys[1:], layer.values[1:] = float("nan"), float("nan")
        for row, ((_, keys, values), n) in enumerate(zip(self.rows, computed, strict=True)):
            slots = slots_of(table, np.full(n, row), np.arange(n), page_size)
            write(layer, keys[:n], values[:n], torch.from_numpy(slots))
        starts = np.concatenate([[0], np.cumsum(lens)])
        self.batch = rows_batch(starts, np.array(computed), table, page_size)

    def attend(self, batch: HostBatch, tokens: np.ndarray | slice = slice(None)) -> torch.Tensor:
        """Write and attend `tokens` of the rows' queries, in this order, as `batch` says -> [T, Hq, D] float64."""
        arena, bucket = single_batch_arena(batch.num_reqs, batch.num_tokens, batch.block_table.shape[1], CPU)
        planned = self._runner.plan(stage(batch, arena, bucket))
        states = (torch.cat([row[i][n:] for row, n in zip(self.rows, self.starts, strict=True)]) for i in range(3))
        return self._runner.attend(planned, 0, *(x[tokens] for x in states))

    def dense(self, visible: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> torch.Tensor:
        """The same without pages: `visible` of query positions [Q, 1] and key positions [S] is the mask [Q, S]."""
        outputs = []
        for (queries, keys, values), n in zip(self.rows, self.starts, strict=True):
            if n == len(keys):
                continue
            positions = np.arange(len(keys))
            mask = torch.from_numpy(visible(positions[n:, None], positions))[None, None]
            q, k, v = (x.transpose(0, 1)[None] for x in (queries[n:], keys, values))
            outputs.append(attend(q, k, v, mask, self.SPEC)[0].transpose(0, 1))
        return torch.cat(outputs)


class Operators(TorchDispatchMode):
    """Counts the operators that are launches on a GPU: all but views and memory."""

    FREE = ("view", "_unsafe_view", "slice", "select", "unsqueeze", "empty", "alias", "expand", "detach", "t")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name not in self.FREE:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))
