"""Eight word problems, answered by the built-in target with its EAGLE-3 head: the same tokens, sooner."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from specdec import Completion, SamplingParams, SpeculativeModel
from specdec.stats import pool_requests
from specdec.tables import percentages, tokens_per_second

PROBLEMS = (
    "Priya has 14 seashells. She finds 23 more on the beach and gives 9 to her cousin. How many seashells does Priya "
    "have now?",
    "A gardener plants 6 rows of tulips with 8 tulips in each row. Rabbits eat 11 of them. How many tulips are left?",
    "A ferry carries 45 passengers on each trip. It makes 4 trips in the morning and 3 trips in the afternoon. How "
    "many passengers does it carry that day?",
    "Omar saves $12 every week for 7 weeks. Then he buys a game for $35. How much money does Omar have left?",
    "Lena baked 60 muffins. She kept half of them and shared the rest equally among 5 neighbours. How many muffins did "
    "each neighbour get?",
    "A school orders 9 boxes of pencils. Each box has 24 pencils. The teachers take 50 pencils. How many pencils are "
    "left for the students?",
    "Marcus runs 3 miles on Monday, twice as far on Tuesday, and 4 miles on Wednesday. How many miles does he run in "
    "total?",
    "Tickets cost $8 for adults and $5 for children. How much do 2 adults and 3 children pay?",
)
"""Written for this demonstration; the built-in models were not trained on them."""

NOTE = (
    "The built-in model has 6.8 million parameters: it has learned the layout of worked answers, and its reasoning is "
    "often wrong. What is shown here is that the head makes it faster and changes no token."
)


def main() -> None:
    """Stream the answers with speculation, repeat without, and compare."""
    console = Console()
    console.print(NOTE, style="dim")
    model = SpeculativeModel.from_pretrained("gsm-llama", draft="auto")
    fast = SamplingParams(max_new_tokens=256)
    plain = SamplingParams(max_new_tokens=256, num_speculative_tokens=0)
    chats = [[{"role": "user", "content": problem}] for problem in PROBLEMS]
    for params in (fast, plain):
        model.generate(chats[0], params)  # warm up
    with_head = [_stream(console, model, problem, chat, fast) for problem, chat in zip(PROBLEMS, chats, strict=True)]
    without = [model.generate(chat, plain)[0] for chat in chats]
    console.print(_summary(model, with_head, without))


def _stream(
    console: Console, model: SpeculativeModel, problem: str, chat: object, params: SamplingParams
) -> Completion:
    console.print(f"\n[bold]{problem}[/bold]")
    for update in model.stream(chat, params):
        sys.stdout.write(update.text)
        sys.stdout.flush()
        if update.completion is not None:
            completion = update.completion
    console.print()
    return completion


def _summary(model: SpeculativeModel, with_head: list[Completion], without: list[Completion]) -> Table:
    pooled = pool_requests([c.stats for c in with_head])
    fast, slow = tokens_per_second(with_head), tokens_per_second(without)
    same = all(a.token_ids == b.token_ids for a, b in zip(with_head, without, strict=True))
    table = Table(title=f"{len(PROBLEMS)} problems, K = {model.num_speculative_tokens}, {model.device}, {model.dtype}")
    table.add_column("")
    table.add_column("with the head", justify="right")
    table.add_column("without", justify="right")
    table.add_row("tokens per target pass (τ)", f"{pooled.tau:.2f}", "1.00")
    table.add_row("accepted at position 1, 2, …", percentages(pooled.unconditional), "–")
    table.add_row("tokens per second", f"{fast:.0f}", f"{slow:.0f}")
    table.add_row("speed-up", f"{fast / slow:.2f}×", "1.00×")
    table.add_row("identical tokens", "yes" if same else "NO", "")
    return table


if __name__ == "__main__":
    main()
