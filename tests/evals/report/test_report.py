"""The table and the page say the same as the document; the page is whole in itself."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from evals.acceptance.acceptance import Plan, run, settings, sweep
from evals.acceptance.metrics import METRICS
from evals.report import page
from evals.report.terminal import (
    MAIN,
    OTHERS,
    RunProgress,
    cautions,
    decimals,
    headline,
    metric_parts,
    print_acceptance,
    show,
    untried,
)
from evals.runs.conversations import Configuration, ModelSpec, Worker
from evals.runs.store import RunStore

pytest.importorskip("matplotlib")
CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)


def document_of(plant: SimpleNamespace, folder: Path, arms: tuple[Configuration, ...], **more: Any) -> dict[str, Any]:
    model = plant.Model(rates=(0.8, 0.6, 0.5), poison="question 4 ")
    executor = Worker({"main": ModelSpec("main")}, plant.loader({"main": model}))
    data = plant.questions(24, turns=2, categories=("math", "writing & <b>", "qa"))
    plan = Plan(data, arms, plant.asking(), **{"warmup": 0, "worst": 3, **more})
    return run(executor, plan, RunStore(folder / "run", settings(plan, executor.facts())), lambda answers: None)


def printed(document: dict[str, Any]) -> str:
    console = Console(width=300, record=True, file=io.StringIO())
    print_acceptance(console, document, explain=True)
    return console.export_text()


class Page(HTMLParser):
    """Collects tags with their attributes, and checks that every element is closed."""

    VOID = frozenset({"meta", "br", "path", "use", "rect", "line", "circle", "stop", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


@pytest.mark.slow
def test_table_prints_every_metric_with_its_definition(plant: SimpleNamespace, tmp_path: Path) -> None:
    document = document_of(plant, tmp_path, sweep((1, 3)))
    text = printed(document)
    for metric in METRICS.values():
        assert metric.label in text and metric.definition in text
    tau = document["arms"][2]["metrics"]["tau"]
    assert f"{tau['estimate']:.3f} [{tau['low']:.3f}, {tau['high']:.3f}]" in text
    assert "is predicted to be the fastest up to the largest measured" in text and "failed: question 4" in text
    assert text.lstrip().startswith(headline(document)) and all(each in text for each in cautions(document))
    assert "23 of 23 answers equal the target alone's" in text


@pytest.mark.slow
@pytest.mark.thorough
def test_page_says_the_same_and_loads_nothing(plant: SimpleNamespace, tmp_path: Path) -> None:
    document = document_of(plant, tmp_path, sweep((1, 3)))
    text = page.render(document)
    parsed = Page(text)
    assert parsed.open == []
    for metric in METRICS.values():
        assert metric.definition in text.replace("&#39;", "'").replace("&lt;", "<")
    assert sum(tag == "svg" for tag, _ in parsed.tags) == 5
    assert not any(tag in ("script", "link", "img", "iframe") for tag, _ in parsed.tags)
    links = [v for _, attrs in parsed.tags for k, v in attrs.items() if k in ("src", "href", "xlink:href") and v]
    assert all(link.startswith("#") for link in links)
    assert "writing &amp; &lt;b&gt;" in text and "<b>" not in text
    assert headline(document) in unescape(text) and "answers unchanged (23 of 23 equal)" in text
    assert sum(tag == "details" for tag, _ in parsed.tags) == 5 + 2  # values of each picture, other counts, provenance
    assert text.index("headline") < text.index(OTHERS) < text.index("<h2>Pictures")
    (third,) = (arm for arm in document["arms"] if arm["k"] == 3)
    for drawn in ("conditional", "unconditional", "per_position_vllm"):
        assert all(text.count(show(value)) for value in third[drawn])
    assert all(f"{count:,} (" in text for count in third["histogram"])
    captions = "".join(re.findall(r"<figcaption>(.*?)</figcaption>", text, re.S))
    assert all(word in captions for word in ("Solid, conditional", "Dashed, unconditional", "Dotted lines, predicted"))
    classes = {attrs.get("class") for tag, attrs in parsed.tags if tag == "span"}
    assert {"accepted", "rejected", "target"} <= classes


@pytest.mark.slow
@pytest.mark.thorough
def test_comparison_without_a_baseline_renders_too(plant: SimpleNamespace, tmp_path: Path) -> None:
    document = document_of(plant, tmp_path, (Configuration("one", 1), Configuration("three", 3)))
    assert "three less one, paired" in printed(document)
    assert "three less one, paired" in page.render(document)


def test_nothing_is_predicted_from_rounds_that_had_no_drafts(plant: SimpleNamespace, tmp_path: Path) -> None:
    """Drafts by lookup. A head's last rounds, before the limit, have none either, and do not count."""
    found = {}
    for name, undrafted in (("lookup", 0.05), ("head", 0.0)):
        model = plant.Model(length=5, undrafted=undrafted)
        executor = Worker({"main": ModelSpec("main")}, plant.loader({"main": model}))
        plan = Plan(plant.questions(24), sweep((3,)), plant.asking(), warmup=0, worst=0)
        store = RunStore(tmp_path / name, settings(plan, executor.facts()))
        found[name] = run(executor, plan, store, lambda answers: None)
        last = [answer.rounds[-1].drafted for answer in store.answers.values() if answer.arm == "K=3"]
        assert last.count(0) > 5
    assert found["head"]["timing"]["prediction"]["table"]
    empty = found["lookup"]["timing"]["prediction"]
    assert empty["table"] == [] and "rounds inside answers had no drafts" in printed(found["lookup"])
    assert page.render(found["lookup"])
    del empty["reason"]  # a document of before
    assert "speed-up not predicted: there were no rounds to time" in printed(found["lookup"])


def told(speedup: tuple[float, float | None, float | None], same: int = 8, **more: Any) -> dict[str, Any]:
    """A document with one drafting configuration."""
    value = dict(zip(("estimate", "low", "high"), speedup, strict=True))
    identical = {"questions": 8, "identical": same}
    arm = {"name": "K=5", "k": 5, "questions": 8, "timing": {"speedup": value}, "identical_to_target_alone": identical}
    params = {"temperature": more.pop("temperature", 0.0)}
    settings = {"settings": {"asking": {"params": params}}}
    document = {
        "arms": [{"name": "target alone", "k": 0, "questions": 8}, arm],
        "not_measured": [],
        "provenance": settings,
    }
    return {**document, "timing": {"runs": 1}, **more}


HEADLINES = [
    (told((2.6, 2.4, 2.8)), "K=5: 2.6 × faster than the target alone [2.4, 2.8]; answers unchanged (8 of 8 equal)."),
    (told((1.1, 0.9, 1.3)), "K=5: no clear speed-up, 1.1 × the target alone's speed [0.9, 1.3]"),
    (told((0.7, 0.6, 0.8)), "K=5: 0.70 × the speed of the target alone [0.60, 0.80]"),
    (told((2.6, None, None), same=6), "2 of 8 answers differ from the target alone's (`specdec eval lossless` says"),
    (
        told((2.6, 2.4, 2.8), same=0, temperature=1.0),
        "8 of 8 answers differ from the target alone's, as sampled ones do",
    ),
    (told((2.6, 2.4, 2.8), not_measured=["K=5"]), "Nothing measured: no draft was verified."),
]


@pytest.mark.parametrize(("document", "text"), HEADLINES)
def test_the_headline_says_in_words_what_was_found(document: dict[str, Any], text: str) -> None:
    assert text in headline(document)


def test_the_numbers_begin_with_the_main_ones_and_leave_none_out() -> None:
    (_, main), (_, others) = metric_parts()
    assert tuple(metric.key for metric in main) == MAIN and main[0].key == "tau"
    assert sorted(m.key for m in (*main, *others)) == sorted(METRICS)


def test_few_questions_get_two_digits(plant: SimpleNamespace, tmp_path: Path) -> None:
    assert (decimals(3.7, 6), decimals(0.95, 6), decimals(110.0, 6, 1), decimals(3.7, 20)) == (1, 2, 0, 3)
    model = plant.Model(rates=(0.8, 0.6, 0.5))
    executor = Worker({"main": ModelSpec("main")}, plant.loader({"main": model}))
    plan = Plan(plant.questions(6), sweep((3,)), plant.asking(), warmup=0)
    document = run(executor, plan, RunStore(tmp_path / "run", settings(plan, executor.facts())), lambda answers: None)
    text = page.render(document)
    (arm,) = (arm for arm in document["arms"] if arm["k"])
    tau = arm["metrics"]["tau"]
    assert show(tau, questions=6) in text and show(tau, 2) not in text


def test_what_the_intervals_leave_out_is_said_beside_them() -> None:
    few, one_run = cautions(told((2.6, 2.4, 2.8)))
    assert "8 questions: intervals are Student's t" in few and "--repeats 5" in one_run
    assert len(cautions(told((2.6, 2.4, 2.8), timing={"runs": 5}))) == 1


def test_an_extrapolation_is_no_advice() -> None:
    cells = [(1, 1.5, False), (2, 1.8, False), (3, 1.9, True)]
    table = [{"batch_size": 1, "k": k, "speedup": speed, "extrapolated": beyond} for k, speed, beyond in cells]
    assert untried({"table": table}, "1") == "; larger K may be faster, which nothing here has measured: try -k 3"
    assert (
        untried({"table": table[:2]}, "1") == untried({"table": [*table[:2], {**table[2], "speedup": 1.7}]}, "1") == ""
    )


@pytest.mark.parametrize(
    ("seconds", "undrafted", "head", "text"),
    [
        (0.1, 0.0, "Eagle3Head", "batch 1: K=3 is predicted to be the fastest"),
        (0.9, 0.0, "Eagle3Head", "batch 1: take K=0 (no drafts) or --draft lookup, whose rounds"),
        (0.9, 0.0, None, "batch 1: take K=0 (no drafts): no K up to the largest measured is predicted to be faster"),
        (0.9, 0.05, None, "take K=0 (no drafts): no K was measured to be faster"),
    ],
)
def test_the_advice_is_no_drafts_or_lookup_where_no_k_is_faster(
    plant: SimpleNamespace, tmp_path: Path, seconds: float, undrafted: float, head: str | None, text: str
) -> None:
    model = plant.Model(length=60, seconds=seconds, undrafted=undrafted)
    executor = Worker({"main": ModelSpec("main")}, plant.loader({"main": model}))
    plan = Plan(plant.questions(24), sweep((1, 3)), plant.asking(), warmup=0)
    document = run(executor, plan, RunStore(tmp_path / "run", settings(plan, executor.facts())), lambda answers: None)
    document["provenance"]["settings"]["models"]["main"]["head"] = head
    for arm in document["arms"]:  # a scripted model takes no time: as its rounds would have it
        arm["timing"]["speedup"] = arm["timing"]["speedup_decode"]
    assert text in printed(document) and text.replace("'", "&#39;") in page.render(document)


def test_progress_counts_questions_and_pools_tau(plant: SimpleNamespace, tmp_path: Path) -> None:
    console = Console(width=120, record=True, file=io.StringIO(), force_terminal=True)
    model = plant.Model(rates=(1.0,), length=11)
    executor = Worker({"main": ModelSpec("main")}, plant.loader({"main": model}))
    plan = Plan(plant.questions(3), sweep((4,)), plant.asking(), warmup=0)
    with RunProgress(console, 3, 2) as progress:
        run(executor, plan, RunStore(tmp_path / "run", settings(plan, executor.facts())), progress)
    text = console.export_text()
    assert "3/3" in text and "τ 5.000" in text


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_page_in_a_real_browser(plant: SimpleNamespace, tmp_path: Path) -> None:
    """Every picture has a size, nothing is wider than the window, and no error is logged."""
    file = tmp_path / "report.html"
    probe = (
        "<script>addEventListener('load', () => { const svgs = [...document.querySelectorAll('figure svg')];"
        "document.body.dataset.probe = JSON.stringify({svgs: svgs.length,"
        "smallest: Math.min(...svgs.map(s => Math.min(s.clientWidth, s.clientHeight))),"
        "wide: document.documentElement.scrollWidth - innerWidth}); })</script>"
    )
    file.write_text(page.render(document_of(plant, tmp_path, sweep((1, 3)))) + probe, "utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--window-size=1280,900"]
    done = subprocess.run(
        [str(CHROMIUM), *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(
        r'data-probe="\{&quot;svgs&quot;:(\d+),&quot;smallest&quot;:(\d+),&quot;wide&quot;:(-?\d+)', done.stdout
    )
    assert found is not None
    svgs, smallest, wide = (int(number) for number in found.groups())
    assert svgs == 5 and smallest > 100 and wide <= 0
