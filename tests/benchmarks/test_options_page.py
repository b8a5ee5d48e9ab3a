"""docs/generation_options.md tells of every field of SamplingParams and of the installed GenerationConfig."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import GenerationConfig

from benchmarks import options_page
from specdec.errors import InvalidInputError
from specdec.options.generation_config import how_served
from specdec.requests.sampling import SamplingParams
from specdec.requests.submission import from_generation_config
from tests.fakes import tiny_llama


def test_the_committed_page_has_every_line() -> None:
    done = CliRunner().invoke(options_page.main, ["--check"])
    assert done.exit_code == 0, done.output
    assert "not known" not in options_page.PAGE.read_text("utf-8")


def test_a_missing_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edited = tmp_path / "options.md"
    edited.write_text(options_page.page().replace("`max_time`, ", ""))
    monkeypatch.setattr(options_page, "PAGE", edited)
    done = CliRunner().invoke(options_page.main, ["--check"])
    assert done.exit_code == 1 and "`max_time`: the same option" in done.output


def test_every_option_has_a_meaning_for_its_first_reader() -> None:
    """In words, before any cell about how it is done; the page does not open with how it was written."""
    text = options_page.PAGE.read_text("utf-8")
    assert text.splitlines()[2].startswith("After this page you can set any option of a request")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| ", text.partition("## GenerationConfig")[0], re.M)
    assert {name for name, _, _ in rows} == {each.name for each in fields(SamplingParams)}
    assert [name for name, _, meaning in rows if len(meaning.split()) < 3] == []
    assert "| `top_k` | `0` | keep the k most probable tokens (0: all)" in text


def test_the_readme_names_what_is_not_served() -> None:
    readme = " ".join((options_page.PAGE.parents[1] / "README.md").read_text("utf-8").split())
    assert "except beams, contrastive search, guidance, DoLa, watermarks and token healing" in readme
    named = {"num_beams", "num_beam_groups", "constraints", "force_words_ids", "penalty_alpha", "guidance_scale"}
    named |= {"dola_layers", "watermarking_config", "token_healing"}
    about_tokens = {
        name for name in options_page.REASONS if not name.startswith(("output", "return", "num_assist", "is_"))
    }
    assert about_tokens == named


VALUES = {
    "constraints": [1],
    "force_words_ids": [[1]],
    "dola_layers": "low",
    "watermarking_config": {"seeding_scheme": "lefthash"},
}


@pytest.mark.parametrize("name", [n for n in vars(GenerationConfig()) if n[0] != "_" and how_served(n) == "refused"])
def test_what_the_page_says_is_refused_is(name: str) -> None:
    """Of a caller's, with a value that does something."""
    config = GenerationConfig(max_new_tokens=4)
    setattr(
        config,
        name,
        VALUES.get(
            name, True if name.startswith(("output", "return", "is_", "use", "assistant_early", "token")) else 3
        ),
    )
    with pytest.raises(InvalidInputError, match=name):
        from_generation_config(config, tiny_llama(), 3)
