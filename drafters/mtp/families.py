"""How the families of multi-token-prediction modules name their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

from drafters.checkpoints.layouts import Layout
from drafters.errors import HeadLoadError

_LAST = "last."
"""Stands for the number of a module's last block."""
_MIXERS = ("full_attention", "moe", "mlp")


@dataclass(frozen=True)
class Family:
    """How one family names the tensors of a module.

    Attributes:
        place: matches a tensor's name; group `k` is the module's number (absent: 0), `part` and `rest` make the name
            inside it.
        renames: names inside a module -> names in MtpHead, by prefix.
        others: what a name that none of them matches begins with in MtpHead: the first block's, or the blocks'.
        hidden_first: see MtpSpec.
        numbered: `k` is a block's number, counted through all modules, and part of the names inside one: the blocks of
            a module are 0 … B-1 there.
        blocks: B, of a module; known once the target is: see `of`.
    """

    name: str
    place: str
    renames: Mapping[str, str]
    others: str = "blocks.0."
    hidden_first: bool = False
    numbered: bool = False
    blocks: int = 1

    def of(self, config: PreTrainedConfig) -> Family:
        """The family with the number of blocks that a target's configuration names.

        Raises:
            HeadLoadError: see `mixers_of`.
        """
        if not self.numbered:
            return self
        blocks = len(mixers_of(config))
        renames = {old.replace(_LAST, f"{blocks - 1}."): new for old, new in self.renames.items()}
        return replace(self, renames=renames, blocks=blocks)

    def rename(self, rest: str) -> str:
        """A name inside a module -> the name in MtpHead."""
        for old, new in self.renames.items():
            if rest.startswith(old):
                return new + rest.removeprefix(old)
        return self.others + rest


DEEPSEEK = Family(
    "DeepSeek-style",
    r"(?:.*\.)?layers\.(?P<k>\d+)\.(?P<rest>.+)",
    {
        "enorm.": "enorm.",
        "hnorm.": "hnorm.",
        "eh_proj.": "eh_proj.",
        "shared_head.norm.": "norm.",
        "final_layernorm.": "norm.",
        "transformer.shared_head.norm.": "norm.",
    },
)
"""The final norm as DeepSeek and GLM, as Ling and Hunyuan, and as Step name it.

Source: sgl-project/sglang 0.5.23, models/deepseek_nextn.py, bailing_moe_nextn.py, hunyuan_v3_nextn.py, step3p5_mtp.py.
"""
MIMO = Family(
    "MiMo-style",
    r"(?:.*\.)?mtp_layers\.(?P<k>\d+)\.(?P<rest>.+)",
    {
        "token_layernorm.": "enorm.",
        "hidden_layernorm.": "hnorm.",
        "input_proj.": "eh_proj.",
        "final_layernorm.": "norm.",
    },
    hidden_first=True,
)
SPECULATORS = replace(MIMO, name="speculators", hidden_first=False)
"""Source: vllm-project/speculators: MiMo's names with the embedding first."""
ERNIE = Family(
    "Ernie-style",
    r"(?:.*\.)?mtp_(?P<part>emb_norm|hidden_norm|linear_proj|block)\.(?P<k>\d+)\.(?P<rest>.+)",
    {"emb_norm.": "enorm.", "hidden_norm.": "hnorm.", "linear_proj.": "eh_proj.", "block.": "blocks.0."},
)
QWEN = Family(
    "Qwen-style",
    r"(?:.*\.)?mtp\.(?P<rest>.+)",
    {
        "pre_fc_norm_embedding.": "enorm.",
        "pre_fc_norm_hidden.": "hnorm.",
        "fc.": "eh_proj.",
        "norm.": "norm.",
        "layers.0.": "blocks.0.",
    },
)
NEMOTRON = Family(
    "Nemotron-H-style",
    r"(?:.*\.)?mtp\.layers\.(?P<k>\d+)\.(?P<rest>.+)",
    {
        "0.enorm.": "enorm.",
        "0.hnorm.": "hnorm.",
        "0.eh_proj.": "eh_proj.",
        f"{_LAST}final_layernorm.": "norm.",
    },
    others="blocks.",
    numbered=True,
)
"""Blocks of one mixer; the projection is in the first, the final norm in the last.

Source: vllm-project/vllm, nemotron_h_mtp.py.
"""

FAMILIES: Mapping[Layout, Family] = {
    Layout.MTP_DEEPSEEK: DEEPSEEK,
    Layout.MTP_MIMO: MIMO,
    Layout.MTP_ERNIE: ERNIE,
    Layout.MTP_QWEN: QWEN,
    Layout.MTP_NEMOTRON: NEMOTRON,
}


def mixers_of(config: PreTrainedConfig) -> tuple[str, ...]:
    """The mixers of a module's blocks, from the configuration of a target whose layers have one each.

    Raises:
        HeadLoadError: it names none, or one that a module cannot have: a recurrent one would need states of its own.
    """
    mixers = tuple(getattr(config, "mtp_layers_block_type", None) or ())
    wrong = sorted(set(mixers) - set(_MIXERS))
    if wrong or not mixers:
        raise HeadLoadError(
            "the checkpoint's multi-token-prediction module has blocks of one mixer (mtp.layers.*.mixer); the target's "
            f"configuration says mtp_layers_block_type={list(mixers)}, allowed are {', '.join(_MIXERS)}"
        )
    return mixers
