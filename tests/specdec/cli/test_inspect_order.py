"""What `specdec inspect` prints first, and that nothing of it is cut."""

from __future__ import annotations

import io

from rich.console import Console

from specdec.cli.tables import fact_notes, facts_table


def test_facts_whose_name_does_not_tell_are_explained_where_they_are_there() -> None:
    facts = {"twin": "exact", "engine": {"fold_rule": None}}
    assert [line.partition(":")[0] for line in fact_notes(facts)] == ["twin"]
    hybrid = {"twin": "exact", "engine": {"fold_rule": {"every": 16}}}
    assert [line.partition(":")[0] for line in fact_notes(hybrid)] == ["twin", "fold_rule"]


def test_a_long_path_is_folded_not_cut() -> None:
    path = "/very" + "/long" * 30
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(facts_table({"target": path}))
    text = console.export_text()
    assert "…" not in text and "".join(text.split()).replace("│", "").count("long") == 30
