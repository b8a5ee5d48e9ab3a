"""`specdec chat`: what was said is told again, Ctrl-C ends an answer and not the program, commands do what they say."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specdec.cli import chat as chat_command
from specdec.cli.chat import Conversation, chat
from specdec.errors import InvalidInputError
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams

QUESTIONS = ["Tom has 3 boxes of 12 eggs. How many eggs?", "Anna has 4 pens and buys 5 more. How many pens?"]
PARAMS = SamplingParams(max_new_tokens=40)


@pytest.fixture(scope="module")
def model() -> SpeculativeModel:
    return SpeculativeModel.from_pretrained("gsm-llama", device="cpu", max_model_len=300)


def talk(model: Any, monkeypatch: pytest.MonkeyPatch, *lines: str, options: tuple[str, ...] = ()) -> Result:
    monkeypatch.setattr(chat_command, "load_for_sampling", lambda options: (model, PARAMS))
    return CliRunner().invoke(chat, [*options], input="\n".join(lines) + "\n", env={"COLUMNS": "200"})


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.slow
@pytest.mark.thorough
def test_a_conversation(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = QUESTIONS
    first = model.generate([user(one)], PARAMS)[0].text
    second = model.generate([user(one), said(first), user(two)], PARAMS)[0].text
    result = talk(model, monkeypatch, "/stats", one, "", two, "/reset", one, "/stats", "/what", "/quit", two)
    assert result.exit_code == 0 and result.stdout == f"{first}\n{second}\n{first}\n"
    assert result.stderr.startswith("SpeculativeModel(gsm-llama, no head, K=0, float32 on cpu")
    assert "no answer has ended yet" in result.stderr and "what was said is forgotten" in result.stderr
    assert result.stderr.count("acceptance length τ") == 1 and result.stderr.count("/quit (or Ctrl-D): end") == 2


@pytest.mark.slow
@pytest.mark.thorough
def test_the_end_of_the_input_ends_it_and_the_system_message_stays(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    system = {"role": "system", "content": "Be brief."}
    asked: list[Any] = []
    own = SpeculativeModel.stream
    monkeypatch.setattr(SpeculativeModel, "stream", lambda self, p, params: asked.append(p) or own(self, p, params))
    result = talk(model, monkeypatch, QUESTIONS[0], "/reset", QUESTIONS[1], options=("--system", "Be brief."))
    assert result.exit_code == 0
    assert asked == [[system, user(QUESTIONS[0])], [system, user(QUESTIONS[1])]]


class Interrupting:
    """A model whose stream is interrupted after its second update, as by Ctrl-C."""

    def __init__(self, model: SpeculativeModel) -> None:
        self.model = model
        self.streams: list[Any] = []

    @contextlib.contextmanager
    def stream(self, prompts: Any, params: Any) -> Any:
        with self.model.stream(prompts, params) as stream:
            self.streams.append(stream)
            yield self._updates(stream)

    def _updates(self, stream: Any) -> Any:
        yield next(stream)
        yield next(stream)
        raise KeyboardInterrupt


@pytest.mark.slow
def test_ctrl_c_ends_the_answer_alone(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """And what was shown of it is part of the conversation."""
    conversation = Conversation(Interrupting(model), PARAMS)  # type: ignore[arg-type]
    assert conversation.take(QUESTIONS[0])
    printed = capsys.readouterr()
    assert conversation.messages == [user(QUESTIONS[0]), said(printed.out.rstrip("\n"))] and "[ended]" in printed.err
    assert len(printed.out) > 1 and conversation.done == [] and model.usage().requests == 0


def test_ctrl_c_at_the_prompt_gives_the_line_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(prompt: str = "") -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert chat_command.next_line() == "" and "/quit (or Ctrl-D)" in capsys.readouterr().err


@pytest.mark.slow
def test_too_long_a_conversation_says_what_to_do(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(model, PARAMS)
    assert conversation.take("eggs " * 400)
    error = capsys.readouterr().err
    assert "Error: the prompt has" in error and "max_model_len=300" in error and "/reset begins a new" in error
    assert conversation.messages == []


def test_a_tokenizer_without_a_chat_template_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        tokenizer = None

    monkeypatch.setattr(chat_command, "load_for_sampling", lambda options: (Plain(), PARAMS))
    with pytest.raises(InvalidInputError, match="gsm-llama has no chat template; use `specdec generate`"):
        CliRunner().invoke(chat, [], catch_exceptions=False)


@pytest.mark.slow
def test_options_of_the_template(model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    asked: list[Any] = []
    nothing = contextlib.nullcontext(())
    monkeypatch.setattr(SpeculativeModel, "stream", lambda *_, **options: asked.append(options) or nothing)
    (file := tmp_path / "a.jinja").write_text("{{ messages }}")
    options = ("--chat-template", str(file), "--chat-template-kwargs", '{"a": 1}')
    assert talk(model, monkeypatch, "b", options=options).exit_code == 0
    assert asked == [{"chat_template": "{{ messages }}", "chat_template_kwargs": {"a": 1}}]
    refused = talk(model, monkeypatch, options=("--chat-template-kwargs", "[1]"))
    assert refused.exit_code == 2 and "'[1]' is no JSON object" in refused.stderr
