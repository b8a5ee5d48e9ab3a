"""`specdec eval`: the group that this package adds to the `specdec` command, by the entry point in pyproject.toml.

`specdec --help` imports this module, and nothing else of the package: a command is imported when it is run.
"""

from __future__ import annotations

from specdec.cli.lazy import CONTEXT, LazyCommand, LazyGroup
from specdec.cli.options import examples

_EVALUATIONS = {
    "acceptance": LazyCommand(
        "evals.cli.commands:acceptance", "Acceptance length, rates and speed-up of a draft head."
    ),
    "lossless": LazyCommand(
        "evals.cli.commands:lossless", "Check that speculation leaves the target's output unchanged."
    ),
    "certify": LazyCommand("evals.cli.commands:certify", "A certificate of exactness, or an audit of other answers."),
    "diverge": LazyCommand("evals.cli.commands:diverge", "Name the operators whose results depend on the batch."),
    "compare": LazyCommand("evals.cli.commands:compare", "Two heads, two K or two backends, paired by prompt."),
    "gsm8k": LazyCommand("evals.cli.accuracy_commands:gsm8k", "GSM8K accuracy with and without speculation (lm-eval)."),
    "humaneval": LazyCommand("evals.cli.accuracy_commands:humaneval", "HumanEval pass@1; runs code the model wrote."),
    "lm-eval": LazyCommand("evals.cli.accuracy_commands:lm_eval", "lm-eval's own command line with the specdec model."),
}

evaluate = LazyGroup(
    "eval",
    lazy=_EVALUATIONS,
    context_settings=CONTEXT,
    short_help="Measure acceptance, speed-up and accuracy; check losslessness.",
    help="Measure a head, and check it.",
    epilog=examples(
        "specdec eval acceptance --data arithmetic --limit 20",
        "specdec eval lossless --data arithmetic --limit 20",
        "specdec eval gsm8k --tasks specdec_arithmetic --limit 50",
    ),
)
