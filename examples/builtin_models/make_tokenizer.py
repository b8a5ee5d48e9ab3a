"""The built-in models' tokenizer: byte-level BPE, single digits, four special tokens, a chat template."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
VOCABULARY = 2048
CHAT_TEMPLATE = """\
{%- set turns = messages -%}
{%- set head = '' -%}
{%- if messages[0]['role'] == 'system' -%}
{%- set turns = messages[1:] -%}
{%- set head = (messages[0]['content'] | trim) + '\\n\\n' -%}
{%- endif -%}
{%- for turn in turns -%}
{%- if turn['role'] not in ('user', 'assistant') -%}
{{- raise_exception("Roles are system (first only), user and assistant, not " + turn['role']) -}}
{%- endif -%}
{{- '<|' + turn['role'] + '|>' -}}
{%- if loop.first -%}{{- head -}}{%- endif -%}
{{- (turn['content'] | trim) + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train the tokenizer on `texts`. Every digit is a token of its own; any byte can be encoded; no BOS is added."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END, USER, ASSISTANT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
