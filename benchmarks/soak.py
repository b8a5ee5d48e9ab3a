"""Random work for one model over minutes, through the public API alone, and every answer checked as it comes.

    python -m benchmarks.soak --minutes 30 --seed 1 [--target gsm-deepseek --draft mtp] [--out FILE]

Streams are opened at random moments and advanced in random order, some are cancelled. Requests differ in K, sampling,
seeds, stops, lengths and kind of prompt; the KV cache is small, so that requests are preempted; some submissions are
invalid. Checked:

- every request ends exactly once, and what was streamed is what the completion says;
- every greedy or seeded request has the tokens, drafts and rounds that it has alone, on a model with room for it; some
  greedy ones also the tokens of transformers' own `generate`;
- an invalid submission is refused and disturbs nobody;
- at quiet moments a fixed set of requests that fills the cache takes the same rounds and transfers as on the fresh
  model, so that no page and no row is lost;
- memory: from the middle third of the quiet moments to the last third it grows by 1 % at most.

The model runs in float64, so that rounding neither hides a difference nor makes one. Ends in one JSON line; the exit
status is 1 when anything was wrong.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import click
import torch
from transformers import GenerationConfig

from benchmarks.document import publish
from specdec import Completion, SamplingParams, SpeculativeModel
from specdec.errors import SpecdecError

PAGE_SIZE = 8
LENGTH = 128
"""max_model_len."""
ROWS = 6
ROW_TOKENS = 40
CACHE_TOKENS = ROWS * ROW_TOKENS
MOST_STREAMS = 10
REMEMBERED = 64
MOST_GROWTH = 0.01
"""Of memory, see `growth`."""
NAMES = ("Tom", "Ann", "Mary", "Bob", "Lisa")
THINGS = ("boxes of eggs", "bags of nuts", "rows of chairs", "packs of pens")
STOPS: tuple[tuple[str, ...], ...] = ((), (), ("n",), ("Question", "=="), ("7", " the"), ("####", "ab"))


@dataclass(frozen=True)
class Subject:
    """What is put under work. `load` makes a SpeculativeModel with these sizes; chats: whether it takes messages."""

    load: Callable[..., SpeculativeModel]
    chats: bool = True

    def with_room(self, rows: int, cache_tokens: int) -> SpeculativeModel:
        """Of so many rows over a cache of so many tokens."""
        sizes = {"max_num_seqs": rows, "kv_cache_tokens": cache_tokens, "max_model_len": LENGTH}
        return self.load(**sizes, max_num_batched_tokens=64, page_size=PAGE_SIZE)


@dataclass
class Stream:
    """An open stream: what its requests asked for, and what came so far by index."""

    updates: Iterator[Any]
    params: list[SamplingParams | None]
    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Memory:
    """At one quiet moment: seconds since the start, resident bytes (None without /proc), bytes traced in Python."""

    seconds: float
    resident: int | None
    traced: int


class Alone:
    """What a request gives when nobody else is there; the last few hundred are remembered."""

    def __init__(self, model: SpeculativeModel) -> None:
        self._model = model
        self.completion = lru_cache(REMEMBERED)(self._completion)
        self.greedy = lru_cache(REMEMBERED)(self._greedy)

    def _completion(self, prompt: tuple[int, ...], params: SamplingParams) -> Completion:
        return self._model.generate(list(prompt), params)[0]

    def _greedy(self, prompt: tuple[int, ...], new: int) -> list[int]:
        """transformers' own tokens, up to an eos id."""
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = self._model.hf_model.generate(ids, max_new_tokens=new, do_sample=False, attention_mask=mask)  # type: ignore[operator]
        return out[0, len(prompt) :].tolist()


class Work:
    """Random prompts and parameters."""

    def __init__(self, rng: random.Random, vocab_size: int, most_drafts: int, chats: bool) -> None:
        self._rng, self._vocab_size, self._most_drafts, self._chats = rng, vocab_size, most_drafts, chats

    def prompt(self) -> Any:
        """Text, a chat, or token ids of random length."""
        rng = self._rng
        kind = rng.random()
        if kind < 0.4:
            return self.ids(rng.choice((rng.randint(1, 8), rng.randint(1, 80))))
        text = f"{rng.choice(NAMES)} has {rng.randint(2, 99)} {rng.choice(THINGS)} and sells {rng.randint(1, 9)}."
        return [{"role": "user", "content": text}] if kind < 0.7 and self._chats else text

    def ids(self, length: int) -> list[int]:
        """Random token ids, none of them special."""
        return [self._rng.randrange(10, self._vocab_size) for _ in range(length)]

    def params(self) -> SamplingParams:
        """Greedy, sampled with a seed, or (rarely) without one."""
        rng = self._rng
        sampled = rng.random() < 0.6
        return SamplingParams(
            max_new_tokens=rng.randint(1, 40),
            temperature=rng.choice((0.5, 0.8, 1.2)) if sampled else 0.0,
            top_k=rng.choice((0, 0, 20)),
            top_p=rng.choice((1.0, 0.9)),
            min_p=rng.choice((0.0, 0.0, 0.05)),
            stop=rng.choice(STOPS),
            stop_token_ids=tuple(self.ids(2)) if rng.random() < 0.2 else (),
            ignore_eos=rng.random() < 0.5,
            seed=None if rng.random() < 0.1 else rng.randrange(1000),
            num_speculative_tokens=rng.choice((None, 0, 1, 3, self._most_drafts)),
            return_drafts=True,
        )

    def invalid(self) -> tuple[Any, Any]:
        """A submission that must be refused as a whole: one prompt is sound, another or the parameters are not."""
        sound = self.ids(5)
        return self._rng.choice(
            (
                ([sound, []], None),
                ([sound, self.ids(500)], None),
                ([sound, [0, self._vocab_size]], None),
                ([sound, sound], [SamplingParams()]),
                ([sound, sound], [SamplingParams(), SamplingParams(num_speculative_tokens=self._most_drafts + 1)]),
                ([sound], GenerationConfig(repetition_penalty=1.5)),
                ([sound], GenerationConfig(num_beams=3)),
                ([], None),
                ([sound, 3.5], None),
            )
        )


class Soak:
    """A model under random work, and the record of what was wrong."""

    def __init__(self, subject: Subject, seed: int) -> None:
        self.alone = Alone(subject.with_room(1, 2 * LENGTH))
        self.model = subject.with_room(ROWS, CACHE_TOKENS)
        self._rng = random.Random(seed)
        vocab_size = self.model.hf_model.config.get_text_config().vocab_size
        self._work = Work(self._rng, vocab_size, self.model.num_speculative_tokens, subject.chats)
        self._full = [self._work.ids(n) for n in (30, 25, 36, 20, 28, 33)]
        self._recent: deque[tuple[Any, SamplingParams | None]] = deque(maxlen=REMEMBERED // 2)
        self.streams: list[Stream] = []
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.memory: list[Memory] = []
        self._started = time.perf_counter()
        self._fresh = self._fill()

    def run(self, actions: int) -> None:
        """Do so many things at random; then let all streams end, and look at pages and memory."""
        for _ in range(actions):
            self._act()
        self._quieten()

    def _act(self) -> None:
        kind = self._rng.random()
        if not self.streams or (kind < 0.35 and len(self.streams) < MOST_STREAMS):
            self._open()
        elif kind < 0.38:
            self._refuse()
        elif kind < 0.42:
            self._close(self._rng.choice(self.streams))
        else:
            stream = self._rng.choice(self.streams)
            for _ in range(self._rng.randint(1, 8)):
                if stream in self.streams:
                    self._advance(stream)

    def _open(self) -> None:
        requests = [self._request() for _ in range(self._rng.choice((1, 1, 2, 3)))]
        prompts, params = [p for p, _ in requests], [s for _, s in requests]
        asked: Any = params
        if self._rng.random() < 0.1:
            asked, params = self._configured(len(prompts))
        self.counts["requests"] += len(params)
        self.streams.append(Stream(self.model.stream(prompts, asked), params))

    def _request(self) -> tuple[Any, SamplingParams | None]:
        """A new request, or one of the last few dozen again, among other neighbours."""
        if self._recent and self._rng.random() < 0.25:
            return self._rng.choice(self._recent)
        self._recent.append((self._work.prompt(), self._work.params()))
        return self._recent[-1]

    def _configured(self, num_prompts: int) -> tuple[GenerationConfig, list[SamplingParams | None]]:
        """As transformers is asked: several samples of each prompt, or its greedy answer. A config has no seed."""
        copies, new = self._rng.randint(1, 3), self._rng.randint(1, 30)
        config = GenerationConfig(do_sample=copies > 1, num_return_sequences=copies, max_new_tokens=new)
        return config, [None if copies > 1 else SamplingParams(max_new_tokens=new)] * copies * num_prompts

    def _refuse(self) -> None:
        prompts, params = self._work.invalid()
        try:
            self.model.generate(prompts, params)
        except SpecdecError:
            self.counts["refused"] += 1
        else:
            self.faults.append(f"accepted: {prompts!r} {params!r}")

    def _close(self, stream: Stream) -> None:
        stream.updates.close()  # type: ignore[attr-defined]
        self.streams.remove(stream)
        self.counts["cancelled"] += len(stream.params) - len(stream.done)

    def _advance(self, stream: Stream) -> None:
        update = next(stream.updates, None)
        if update is None:
            self.streams.remove(stream)
            if len(stream.done) != len(stream.params):
                self.faults.append(f"lost: {len(stream.params)} requests, {len(stream.done)} completions")
            return
        index = update.index
        if index in stream.done:
            self.faults.append(f"an update after the completion: {update!r}")
        stream.tokens[index] = stream.tokens.get(index, []) + update.token_ids
        stream.text[index] = stream.text.get(index, "") + update.text
        if update.completion is not None:
            stream.done.add(index)
            self._check(update.completion, stream.tokens.pop(index), stream.text.pop(index), stream.params[index])

    def _check(self, found: Completion, tokens: list[int], text: str, params: SamplingParams | None) -> None:
        self.counts["finished"] += 1
        self.counts["new_tokens"] += len(tokens)
        self.counts["preempted"] += found.stats.preemptions > 0
        if (tokens, text) != (found.token_ids, found.text):
            self.faults.append(f"streamed {tokens} {text!r}, completed {found.token_ids} {found.text!r}")
        if found.stats.new_tokens != len(tokens) or len(tokens) != 1 + sum(r.emitted for r in found.stats.rounds):
            self.faults.append(f"{len(tokens)} tokens, but {found.stats}")
        if params is None or not (params.greedy or params.seed is not None):
            self.counts["unseeded"] += 1
            return
        prompt = tuple(found.prompt_token_ids)
        alone = self.alone.completion(prompt, params)
        self.counts["greedy" if params.greedy else "seeded"] += 1
        if _essence(alone) != _essence(found):
            self.counts["mismatches"] += 1
            self.faults.append(f"{params} {prompt}: {_essence(found)}, alone {_essence(alone)}")
        if params.greedy and not params.ignore_eos and self._rng.random() < 0.2:
            self.counts["greedy_by_transformers"] += 1
            if self.alone.greedy(prompt, params.max_new_tokens)[: len(tokens)] != tokens:
                self.counts["mismatches"] += 1
                self.faults.append(f"{params} {prompt}: {tokens}, transformers says otherwise")

    def _quieten(self) -> None:
        while self.streams:
            self._advance(self._rng.choice(self.streams))
        cost = self._fill()
        if cost != self._fresh:
            self.faults.append(f"filling the cache took {cost}, on the fresh model {self._fresh}")
        self.counts["quiet_moments"] += 1
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0]
        self.memory.append(Memory(round(time.perf_counter() - self._started, 1), resident_bytes(), traced))

    def _fill(self) -> dict[str, int]:
        """What requests cost that fill every row and every page: first exactly, then with drafts and preemption."""
        before = vars(self.model.engine_stats).copy()
        exact = [SamplingParams(max_new_tokens=ROW_TOKENS + 1 - len(p), ignore_eos=True) for p in self._full]
        self.model.generate(self._full, [replace(p, num_speculative_tokens=0) for p in exact])
        if self.model.engine_stats.preemptions != before["preemptions"]:
            self.faults.append("requests that fit the cache exactly were preempted")
        self.model.generate(self._full, [replace(p, max_new_tokens=30) for p in exact])
        return {name: count - before[name] for name, count in vars(self.model.engine_stats).items()}


def _essence(completion: Completion) -> tuple[Any, ...]:
    """What must not depend on the batch."""
    drafts = completion.drafts
    return completion.token_ids, completion.text, completion.finish_reason, drafts, completion.stats.rounds


def resident_bytes() -> int | None:
    """Resident memory of this process; None where the system has no /proc."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return 1024 * int(line.split()[1])


def growth(values: list[int]) -> float | None:
    """Mean of the last third of the values over that of the middle third, less 1; None with fewer than six."""
    third = len(values) // 3
    if third < 2:
        return None
    return sum(values[-third:]) / sum(values[-2 * third : -third]) - 1


def soak(subject: Subject, minutes: float, seed: int, actions: int) -> dict[str, Any]:
    """Run, with a quiet moment after every so many actions, and sum up; `faults` names the first of what was wrong."""
    torch.set_num_threads(1)
    tracemalloc.start()
    try:
        work = Soak(subject, seed)
        stop = time.perf_counter() + 60 * minutes
        while time.perf_counter() < stop:
            work.run(actions)
    finally:
        tracemalloc.stop()
    stats = work.model.engine_stats
    resident = [m.resident for m in work.memory if m.resident is not None]
    return {
        "benchmark": "soak",
        "minutes": minutes,
        "seed": seed,
        **{name: work.counts[name] for name in ("requests", "finished", "cancelled", "refused", "mismatches")},
        **work.counts,
        "rounds": stats.rounds,
        "preemptions": stats.preemptions,
        "resident_growth": growth(resident),
        "traced_growth": growth([m.traced for m in work.memory]),
        "memory": [vars(m) for m in work.memory],
        "num_faults": len(work.faults),
        "faults": [fault[:2000] for fault in work.faults[:5]],
    }


@click.command()
@click.option("--minutes", default=30.0, show_default=True)
@click.option("--target", default="gsm-llama", show_default=True)
@click.option("--draft", default="auto", show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--actions", default=100, show_default=True, help="Actions between two quiet moments.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the JSON there.")
def main(minutes: float, target: str, draft: str, seed: int, actions: int, out: Path | None) -> None:
    """Put a model under random work and check every answer."""
    subject = Subject(partial(SpeculativeModel.from_pretrained, target, draft, dtype="float64"))
    document = {"target": target, "draft": draft, **soak(subject, minutes, seed, actions)}
    publish(document, out)
    grown = any((document[name] or 0.0) > MOST_GROWTH for name in ("resident_growth", "traced_growth"))
    if grown or document["num_faults"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
