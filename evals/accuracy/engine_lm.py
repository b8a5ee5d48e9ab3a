"""Our engine as an lm-eval model: generation and log-likelihoods. Imported only where lm-eval is installed.

All requests of a run go into one generate call, so that the batch is never drained between tasks, and texts to score
into the same batch. An answer does not depend on what else is in the batch. Source: EleutherAI/lm-evaluation-harness
docs/model_guide.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import torch
from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import has_bos_prefix
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from evals.acceptance.summary import Json
from evals.accuracy.generation import Generation, Thinking
from evals.data.datasets import Messages, digest
from evals.runs.answers import Answer
from evals.runs.conversations import Configuration, question_seed, to_turn
from evals.runs.store import RunStore
from specdec.errors import InvalidInputError
from specdec.requests.chats import for_template
from specdec.requests.grammar import Grammar
from specdec.requests.sampling import SamplingParams
from specdec.requests.stats import RequestStats, RoundRecord, pool
from specdec.values import Options, without

Report = Callable[[list[Answer]], None]
Pair = tuple[list[int], list[int]]
"""Token ids of a prompt, and of what is scored after it."""
Step = TypeVar("Step")
Score = tuple[float, bool]
"""The log-likelihood of a continuation, and whether greedy decoding gives it."""
_SCORED_AT_ONCE = 1024
"""Texts of one call: what an interrupted run had scored before it is in lm-eval's cache of answers."""
_WARM_UP = 16
"""Most new tokens of the answer before a clock starts."""
_LOG = logging.getLogger(__name__)


class EngineLM(TemplateLM):
    """A loaded `specdec.SpeculativeModel` as an lm-eval model, for `simple_evaluate(model=...)`.

    Attributes:
        tokenizer, batch_sizes, max_length, max_gen_toks: read by lm-eval.
        prompts: statistics of the requests that were generated now.
        rounds: the verification rounds of everything generated so far.
    """

    def __init__(
        self,
        model: Any,
        arm: Configuration,
        *,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Options | None = None,
        schema_field: str | None = None,
        seed: int = 0,
        store: RunStore | None = None,
        report: Report = lambda answers: None,
        progress: bool = False,
        timed: bool = False,
    ) -> None:
        """Arguments that lm-eval's `hf` has mean what they mean there.

        Args:
            schema_field: of a task's documents, a JSON schema that the answer follows (see `Grammar.json`). Where it is
                one that cannot be followed, the answer is free, and a warning says why.
            arm: its K is used. store: answers kept there are not generated again. report: called with each answer.
            progress: show bars. timed: times are compared with another's. No request finds or leaves pages in the
                prefix cache, and one prompt is answered before the clock starts.

        Raises:
            InvalidInputError: enable_thinking without think_end_token, or chat_template_args that are no mapping.
        """
        super().__init__()
        self.tokenizer = model.tokenizer
        self.batch_sizes: dict[str, int] = {}
        self.rounds: list[RoundRecord] = []
        self.prompts: list[RequestStats] = []
        self.max_length = int(model.config.max_model_len)
        self.max_gen_toks = max_gen_toks
        self._device = model.device
        self._model = model
        self._arm = arm
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self._thinking = Thinking.of(enable_thinking, think_end_token, chat_template_args)
        self._schema_field = schema_field
        self._seed = seed
        self._store = store
        self._report = report
        self._progress = progress
        self._timed = timed
        self._generations: dict[str, Generation] = {}

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        given = self._prefix_token_id
        bos = self.tokenizer.bos_token_id
        if given is not None:
            return given
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: Messages, add_generation_prompt: bool = True) -> str:
        """The text of a conversation; without its system message where the template refuses one."""
        try:
            return self._templated(chat_history, add_generation_prompt)
        except TemplateError:
            _LOG.warning("the chat template failed; trying again without the system message")
            others = [message for message in chat_history if message["role"] != "system"]
            return self._templated(others, add_generation_prompt)

    def _templated(self, messages: Messages, add_generation_prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(
            for_template(messages, self.tokenizer),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._thinking.template_args,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; no second begin-of-text token where the string starts with one."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = False if bos and has_bos_prefix(string, bos) else self._add_bos_token
        extra = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **extra)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer all requests in one generate call, in the order given."""
        # A name for each request from its task, document and prompt, and numbers repeats of one request.
        seen: dict[str, int] = {}
        names = []
        for request in requests:
            name = f"{request.task_name}/{request.doc_id}/{request.idx}/{digest(request.args)[:16]}"
            seen[name] = seen.get(name, 0) + 1
            names.append(f"{name}/{seen[name]}")
        asked = dict(zip(names, requests, strict=True))
        kept = {}
        if self._store is not None:  # what an interrupted run has stored
            arm = self._arm.name
            kept = {name: self._store.answers[name, arm] for name in asked if self._store.finished(name, [arm])}
        self._report(list(kept.values()))
        left = without(asked, kept)
        generated = self._bar(self._generate(left, timed=not kept), len(left), "generate_until", disable_tqdm)
        texts = {a.question_id: self._text(a, asked[a.question_id]) for a in chain(kept.values(), generated)}
        return [texts[name] for name in asked]

    def _generate(self, asked: Mapping[str, Instance], timed: bool) -> Iterator[Answer]:
        """Generate, and store each answer as it finishes. An answer's wall time is the time since the last one; 0 where
        it is not timed, as the requests that an interrupted run had in flight are begun once more."""
        prepared = self._prepared(asked)
        if not prepared:
            return
        if self._timed:
            _, ids, params = prepared[0]
            self._model.generate([ids], [replace(params, max_new_tokens=min(params.max_new_tokens, _WARM_UP))])
        last = time.perf_counter()
        for i, completion in self._model.generate_iter([p for _, p, _ in prepared], [q for _, _, q in prepared]):
            now = time.perf_counter()
            self.prompts.append(completion.stats)
            name = prepared[i][0]
            task = str(asked[name].task_name)
            answer = Answer(
                name, self._arm.name, task, task, (to_turn(self.tokenizer, completion, (now - last) * timed),)
            )
            if self._store is not None:
                self._store.add([answer])
            self._report([answer])
            yield answer
            last = time.perf_counter()

    def _prepared(self, asked: Mapping[str, Instance]) -> list[tuple[str, list[int], SamplingParams]]:
        """Name, prompt ids and sampling of each request: those with the same gen_kwargs together, the longest prompts
        first.

        Raises:
            InvalidInputError: see `Generation.of`.
        """
        groups: dict[str, list[str]] = {}
        for name, request in asked.items():
            groups.setdefault(digest(request.args[1]), []).append(name)
        found = []
        for names in groups.values():
            how = self._generation(asked[names[0]])
            prompts = {name: self.tok_encode(asked[name].args[0]) for name in names}
            for name in sorted(names, key=lambda name: (-len(prompts[name]), prompts[name])):
                seed = question_seed(int(self._seed if how.seed is None else how.seed), name, 0)
                cached = how.params.cache_prefix and not self._timed
                params = replace(how.params, seed=seed, num_speculative_tokens=self._arm.k, cache_prefix=cached)
                ids = how.fitting(prompts[name])
                found.append((name, ids, self._with_grammar(params, ids, asked[name])))
        return found

    def _with_grammar(self, params: SamplingParams, ids: list[int], request: Instance) -> SamplingParams:
        """With the schema of the request's document, where there is one that can be followed.

        Raises:
            InvalidInputError: its documents have no such field.
        """
        field = self._schema_field
        if field is None:
            return params
        if field not in request.doc:
            raise InvalidInputError(
                f"schema_field={field!r}: documents of {request.task_name} have {', '.join(map(str, request.doc))}"
            )
        try:
            own = replace(params, grammar=Grammar.json(request.doc[field]))
            self._model.engine.admission.check(ids, own)
        except InvalidInputError as error:
            _LOG.warning("%s, document %s: answered without its schema: %s", request.task_name, request.doc_id, error)
            return params
        return own

    def _generation(self, request: Instance) -> Generation:
        gen_kwargs = request.args[1]
        key = digest(gen_kwargs)
        if key not in self._generations:
            self._generations[key] = Generation.of(gen_kwargs, self._model, self.max_gen_toks)
        return self._generations[key]

    def _text(self, answer: Answer, request: Instance) -> str:
        """The text of an answer, stored in lm-eval's cache of answers at once."""
        self.rounds += answer.rounds
        text = self._generation(request).answer(self._thinking.left_out(answer.turns[0], self.tokenizer))
        self.cache_hook.add_partial("generate_until", request.args, text)
        return text

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Score]:
        """Log-probability of each continuation, and whether it is the greedy one.

        Raises:
            InvalidInputError: the model thinks first, so that what follows the prompt is never the continuation.
        """
        if self._thinking.enabled:
            tasks = ", ".join(sorted({str(request.task_name) for request in requests}))
            raise InvalidInputError(
                f"enable_thinking=True with tasks that score given texts ({tasks}): leave it out, or choose tasks that "
                "generate"
            )
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[Score]:
        """Log-probability of each continuation, and whether it is the greedy one; by the target alone, in batches."""
        pairs = [_last_tokens(context, own, self.max_length) for _, context, own in requests]
        if cut := sum(len(a) < len(context) for (a, _), (_, context, _) in zip(pairs, requests, strict=True)):
            _LOG.warning("%d of %d contexts lost tokens on the left: max_length=%d", cut, len(pairs), self.max_length)
        order = sorted(range(len(pairs)), key=lambda i: pairs[i])  # prompts with the same beginning stand together
        found = {}
        for i, score in self._bar(self._scored(pairs, order), len(order), "loglikelihood", disable_tqdm):
            found[i] = score
            if requests[i][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[i][0], score)
        return [found[i] for i in range(len(pairs))]

    def _scored(self, pairs: Sequence[Pair], order: Sequence[int]) -> Iterator[tuple[int, Score]]:
        """(place, score) of each pair. A pair of one token more than a request can have, which `hf` scores too, is
        scored by the model's own forward."""
        fitting = [i for i in order if sum(map(len, pairs[i])) <= self.max_length]
        for start in range(0, len(fitting), _SCORED_AT_ONCE):
            part = fitting[start : start + _SCORED_AT_ONCE]
            scores = self._model.score([pairs[i][0] for i in part], [pairs[i][1] for i in part], logprobs=0)
            yield from ((i, (score.logprob, score.is_greedy)) for i, score in zip(part, scores, strict=True))
        for i in sorted(set(order) - set(fitting)):
            yield i, self.scored_alone(*pairs[i])

    @torch.inference_mode()
    def scored_alone(self, context: list[int], own: list[int]) -> Score:
        logits = self._model.own_logits(context + own[:-1])[-len(own) :]
        wanted = torch.tensor(own, device=logits.device)
        score = float(logits.float().log_softmax(-1).gather(1, wanted[:, None]).sum())
        return score, bool((logits.argmax(-1) == wanted).all())

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in disjoint windows, those of all texts in one batch."""
        windows = []
        for i, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            overlapping = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            windows += [(i, make_disjoint_window(window)) for window in overlapping]
        scores = self._loglikelihood_tokens([(None, *pair) for _, pair in windows], disable_tqdm)
        totals = [0.0] * len(requests)
        for (i, _), (score, _) in zip(windows, scores, strict=True):
            totals[i] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _bar(self, steps: Iterator[Step], total: int, what: str, disable: bool) -> Iterator[Step]:
        """The steps, with a progress bar on the first process, as lm-eval's own models show it."""
        hidden = disable or not self._progress or self.rank > 0
        yield from tqdm(steps, f"Running {what} requests", total, disable=hidden)

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
                **self.cache_facts(),
            }
        }

    def cache_facts(self) -> Json:
        """Prompt tokens of the requests that were generated now, and those and the share found in the prefix cache."""
        names = ("prompt_tokens", "prefix_hit_tokens", "cached_tokens")
        facts: Json = {name: sum(getattr(stats, name) for stats in self.prompts) for name in names}
        rate = facts["prefix_hit_tokens"] / facts["prompt_tokens"] if facts["prompt_tokens"] else None
        return {**facts, "prefix_hit_rate": rate}


def _last_tokens(context: list[int], own: list[int], most: int) -> Pair:
    """A pair as `hf` cuts it: of the last most + 1 tokens, since the last one is not read.

    Raises:
        InvalidInputError: what is scored is longer than a request can be.
    """
    if len(own) > most:
        raise InvalidInputError(f"a text of {len(own)} tokens is to be scored at once; max_length is {most}")
    return context[-(most + 1 - len(own)) :], own
