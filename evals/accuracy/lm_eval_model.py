"""Our engine as a model of lm-eval. Imported only where lm-eval is installed (extra [eval]).

All requests of a run go into one generate call, so that the batch is never drained between tasks. An answer does not
depend on what else is in the batch. Source: EleutherAI/lm-evaluation-harness docs/model_guide.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import has_bos_prefix, maybe_truncate, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from evals.acceptance.summary import Json
from evals.data.datasets import digest
from evals.runs.answers import Answer
from evals.runs.conversations import Configuration, ModelSpec, question_seed, to_turn
from evals.runs.store import RunStore
from specdec.errors import InvalidInputError
from specdec.options import LoadOptions
from specdec.requests.prompts import for_template
from specdec.requests.sampling import SamplingParams
from specdec.requests.stats import RoundRecord, pool

_KNOWN_KWARGS = frozenset({"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p", "seed"})
NAME = "specdec"
Report = Callable[[list[Answer]], None]


class EngineLM(TemplateLM):
    """A loaded `specdec.SpeculativeModel` as an lm-eval model, for `simple_evaluate(model=...)`.

    prompt_tokens, prefix_hit_tokens, cached_tokens: of the answers generated now, see `RequestStats`. rounds: the
    verification rounds of everything generated so far.
    """

    def __init__(
        self,
        model: Any,
        arm: Configuration,
        *,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        think_end_token: str | None = None,
        seed: int = 0,
        store: RunStore | None = None,
        report: Report = lambda answers: None,
    ) -> None:
        """arm: its K is used. store: answers kept there are not generated again. report: called with each answer."""
        super().__init__()
        self.tokenizer = model.tokenizer
        self.batch_sizes: dict[str, int] = {}
        self.rounds: list[RoundRecord] = []
        self.prompt_tokens = self.prefix_hit_tokens = self.cached_tokens = 0
        self._model = model
        self._arm = arm
        self._max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._think_end_token = think_end_token
        self._seed = seed
        self._store = store
        self._report = report

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        return int(self._model.config.max_model_len)

    @property
    def max_gen_toks(self) -> int:
        return self._max_gen_toks

    @property
    def device(self) -> Any:
        return self._model.device

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = self.tokenizer.apply_chat_template(
            for_template(chat_history, self.tokenizer),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; no second begin-of-text token where the string starts with one."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = False if bos and has_bos_prefix(string, bos) else self._add_bos_token
        extra = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer.encode(string, **extra)
        return ids

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer all requests in one generate call, in the order given."""
        names = _names(requests)
        answers = self._kept(names)
        left = [i for i, name in enumerate(names) if name not in answers]
        self._report(list(answers.values()))
        answers.update(self._generate([(names[i], requests[i]) for i in left]))
        texts = []
        for name, request in zip(names, requests, strict=True):
            self.rounds += answers[name].rounds
            text = self._cut(answers[name].turns[0].text, request)
            self.cache_hook.add_partial("generate_until", request.args, text)
            texts.append(text)
        return texts

    def _kept(self, names: Sequence[str]) -> dict[str, Answer]:
        """The answers that an interrupted run has stored."""
        if self._store is None:
            return {}
        arm = self._arm.name
        return {name: self._store.answers[name, arm] for name in names if self._store.finished(name, [arm])}

    def _generate(self, asked: Sequence[tuple[str, Instance]]) -> dict[str, Answer]:
        """Generate, and store each answer as it finishes. An answer's wall time is the time since the last one."""
        if not asked:
            return {}
        prepared = [self._prepare(name, request) for name, request in asked]
        answers = {}
        last = time.perf_counter()
        for i, completion in self._model.generate_iter([p for p, _ in prepared], [q for _, q in prepared]):
            now = time.perf_counter()
            self.prompt_tokens += completion.stats.prompt_tokens
            self.prefix_hit_tokens += completion.stats.prefix_hit_tokens
            self.cached_tokens += completion.stats.cached_tokens
            name, request = asked[i]
            task = str(request.task_name)
            turn = to_turn(self.tokenizer, completion, now - last)
            answers[name] = Answer(name, self._arm.name, task, task, (turn,))
            if self._store is not None:
                self._store.add([answers[name]])
            self._report([answers[name]])
            last = time.perf_counter()
        return answers

    def _prepare(self, name: str, request: Instance) -> tuple[list[int], SamplingParams]:
        """Prompt ids and sampling of a request.

        Raises:
            InvalidInputError: a generation argument that this model does not have, which would change results; or no
                room for a prompt.
        """
        context, gen_kwargs = request.args
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, self._max_gen_toks))
        unknown = sorted(set(kwargs) - _KNOWN_KWARGS)
        if unknown:
            raise InvalidInputError(f"generation arguments not supported: {unknown}; known are {sorted(_KNOWN_KWARGS)}")
        longest = kwargs["max_gen_toks"]
        if longest >= self.max_length:  # lm-eval would cut the whole prompt off
            raise InvalidInputError(
                f"the task generates up to {longest:,} tokens, which leaves no room for a prompt in max_model_len="
                f"{self.max_length:,}; raise max_model_len (--max-model-len) to {longest:,} and a prompt's length"
            )
        ids, most = maybe_truncate(self.tok_encode(context), longest, self.max_length, side="left")
        params = SamplingParams(
            max_new_tokens=most,
            temperature=float(kwargs.get("temperature", 0.0)) if kwargs["do_sample"] else 0.0,
            top_p=float(kwargs.get("top_p", 1.0)),
            top_k=int(kwargs.get("top_k", 0)),
            min_p=float(kwargs.get("min_p", 0.0)),
            stop=tuple(stop for stop in kwargs["until"] if stop),
            seed=question_seed(int(kwargs.get("seed", self._seed)), name, 0),
            num_speculative_tokens=self._arm.k,
        )
        return ids, params

    def _cut(self, text: str, request: Instance) -> str:
        until = normalize_gen_kwargs(request.args[1], self._max_gen_toks)["until"]
        return str(postprocess_generated_text(text, until, self._think_end_token))

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether it is the greedy one; by the target alone, in turn."""
        scores = []
        for key, context, continuation in requests:
            ids = (context + continuation)[-(self.max_length + 1) :]
            logits = self._model.own_logits(ids[:-1])[-len(continuation) :]
            wanted = torch.tensor(ids[-len(continuation) :], device=logits.device)
            score = float(logits.float().log_softmax(-1).gather(1, wanted[:, None]).sum())
            scores.append((score, bool((logits.argmax(-1) == wanted).all())))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, scores[-1])
        return scores

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in disjoint windows."""
        return [self._rolling(request.args[0]) for request in requests]

    def _rolling(self, text: str) -> float:
        tokens = self.tok_encode(text)
        windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
        pairs = [make_disjoint_window(window) for window in windows]
        return sum(score for score, _ in self._loglikelihood_tokens([(None, a, b) for a, b in pairs]))

    def get_model_info(self) -> Json:
        """Statistics of speculation, which lm-eval merges into the `config` of its results."""
        stats = pool(self.rounds)
        return {
            "specdec_stats": {
                "num_speculative_tokens": self._arm.k,
                "tau": stats.tau if stats.rounds else None,
                "rounds": stats.rounds,
                "emitted": stats.emitted,
                "drafted": stats.drafted,
                "accepted": stats.accepted,
                "prompt_tokens": self.prompt_tokens,
                "prefix_hit_tokens": self.prefix_hit_tokens,
                "cached_tokens": self.cached_tokens,
                "prefix_hit_rate": self.prefix_hit_tokens / self.prompt_tokens if self.prompt_tokens else None,
            }
        }


class SpecdecLM(EngineLM):
    """The lm-eval model "specdec", as its command line makes it from `--model_args pretrained=...,draft=...`."""

    def __init__(
        self,
        pretrained: str,
        draft: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        think_end_token: str | None = None,
        **options: Any,
    ) -> None:
        """Load the model.

        Args:
            pretrained: the target; draft: its head. max_length: lm-eval's name for max_model_len.
            batch_size: lm-eval's; more than 1 replaces max_num_seqs.
            options: load options, see LoadOptions. lm-eval's command line gives device="cuda:0" when nothing was asked
                for, so on a machine without CUDA, and for a model divided among GPUs, that means the default device.

        Raises:
            InvalidInputError: an unknown model argument; what `SpeculativeModel.from_pretrained` raises.
        """
        spec = ModelSpec(str(pretrained), draft, _load_options(options, max_batch_size or batch_size, max_length))
        model = spec.load()
        super().__init__(
            model,
            Configuration(NAME, model.num_speculative_tokens),
            max_gen_toks=max_gen_toks,
            add_bos_token=add_bos_token,
            think_end_token=think_end_token,
            seed=spec.options.seed,
        )


def _load_options(given: dict[str, Any], batch_size: int | str, max_length: int | None) -> LoadOptions:
    """lm-eval's model arguments as load options.

    Raises:
        InvalidInputError: an unknown one, a value that is not allowed, or max_length beside max_model_len.
    """
    known = [each.name for each in fields(LoadOptions)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise InvalidInputError(
            f"unknown model_args: {', '.join(unknown)}; known are pretrained, draft, max_length, max_gen_toks, "
            f"add_bos_token, think_end_token, {', '.join(known)}"
        )
    if max_length is not None and given.get("max_model_len") is not None:
        raise InvalidInputError("max_length and max_model_len are the same model argument; give one of them")
    options = dict(given)
    if max_length is not None:
        options["max_model_len"] = max_length
    if str(batch_size).isdigit() and int(batch_size) > 1:
        options["max_num_seqs"] = int(batch_size)
    divided = str(options.get("tensor_parallel_size", 1)) != "1"  # whose rank 0 is on cuda:0 anyway
    if options.get("device") == "cuda:0" and (divided or not torch.cuda.is_available()):
        del options["device"]
    return LoadOptions.from_words(options)


def register() -> None:
    """Make `--model specdec` known to lm-eval releases that do not scan entry points.

    Source: EleutherAI/lm-evaluation-harness lm_eval/api/registry.py (the stock models register on import).
    """
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target=SpecdecLM)


def _names(requests: Sequence[Instance]) -> list[str]:
    """A name for each request that tells its task, document and prompt, and numbers repeats of one request."""
    seen: dict[str, int] = {}
    names = []
    for request in requests:
        name = f"{request.task_name}/{request.doc_id}/{request.idx}/{digest(request.args)[:16]}"
        seen[name] = seen.get(name, 0) + 1
        names.append(f"{name}/{seen[name]}")
    return names
