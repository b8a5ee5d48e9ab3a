"""Heads that the authors' own packages write are read here, and draft what their code drafts, round by round."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from fakes import VOCAB, hf_greedy, random_prompts, tiny_llama, wrap
from transformers import Qwen3Config

from drafters.checkpoints.config_fields import Config
from specdec.requests.sampling import SamplingParams
from specdec.selftest.twin import enlarge

PROMPTS = random_prompts((5, 33, 17))
GREEDY = SamplingParams(max_new_tokens=16, return_drafts=True)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "num_target_layers": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
FULL, NEAR = "full_attention", "sliding_attention"
DFLASH: dict[str, Config] = {
    "plain": {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2], "block_size": 5}},
    "windows": {
        "layer_types": [NEAR, FULL],
        "sliding_window": 4,
        "use_sliding_window": True,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 1, 2], "block_size": 6},
    },
    "windows in both directions": {
        "layer_types": [NEAR, NEAR],
        "sliding_window": 3,
        "use_sliding_window": True,
        "is_causal": False,
        "dflash_config": {"mask_token_id": 7, "block_size": 8, "target_layer_ids": [1, 3], "output_multiplier": 0.5},
    },
    "default layers": {"num_hidden_layers": 1, "block_size": 4, "mask_token_id": 9, "attention_bias": True},
    "scaled": {
        "dflash_config": {
            "mask_token_id": 7,
            "target_layer_ids": [0, 1, 2, 3],
            "block_size": 5,
            "input_embedding_scale": 2.0,
            "final_logit_softcapping": 3.0,
        }
    },
}

SECOND = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 5, "selector_top_k": 16}
DFLASH2: dict[str, Any] = {
    "plain": {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2], "block_size": 5, **SECOND}},
    "windows": {
        **DFLASH["windows"],
        "dflash_config": {**DFLASH["windows"]["dflash_config"], **SECOND, "selector_top_k": 1},
    },
    "windows in both directions": {
        **DFLASH["windows in both directions"],
        "dflash_config": {**DFLASH["windows in both directions"]["dflash_config"], **SECOND, "selector_top_k": 64},
    },
    "longer convolutions": {
        "num_hidden_layers": 1,
        "block_size": 4,
        "mask_token_id": 9,
        "attention_bias": True,
        **SECOND,
        "conv_kernel_size": 4,
        "conv_group_size": 1,
        "selector_top_k": 3,
    },
    "scaled": {**DFLASH["scaled"], "dflash_config": {**DFLASH["scaled"]["dflash_config"], **SECOND}},
}


def random_dflash(seed: int, second: bool) -> Config:
    """Layers 1 to 4, 1 to 5 of the target's states, blocks of 4 to 12, windows of some layers or none, both directions
    or not; second: with convolutions and a selector."""
    rng = Random(seed)
    layers, block = rng.randint(1, 4), rng.randint(4, 12)
    inner: Config = {"mask_token_id": rng.randrange(VOCAB), "block_size": block}
    inner["target_layer_ids"] = sorted(rng.sample(range(-1, 4), rng.randint(1, 5)))
    if rng.random() < 0.3:
        inner |= {"input_embedding_scale": 1.5, "output_multiplier": 0.7}
    if second:
        inner |= {"conv_kernel_size": rng.randint(2, 4), "conv_group_size": rng.choice((1, 4, 16, 32))}
        inner |= {"selector_rank": rng.randint(1, 8), "selector_top_k": rng.randint(1, VOCAB)}
    own: Config = {"num_hidden_layers": layers, "attention_bias": rng.random() < 0.3, "dflash_config": inner}
    if rng.random() < 0.6:
        kinds = [rng.choice((FULL, NEAR)) for _ in range(layers)]
        own |= {"layer_types": kinds, "sliding_window": rng.randint(2, 20), "use_sliding_window": True}
        own |= {"is_causal": False} if rng.random() < 0.5 else {}
    return own


def random_dspark(seed: int) -> Config:
    """As `random_dflash`, with a Markov head of some kind or none."""
    rng = Random(1000 + seed)
    kind = rng.choice(("vanilla", "gated", "rnn", None))
    return {
        "num_hidden_layers": rng.randint(1, 4),
        "block_size": rng.randint(3, 12),
        "mask_token_id": rng.randrange(VOCAB),
        "target_layer_ids": sorted(rng.sample(range(-1, 4), rng.randint(1, 5))),
        **({"markov_rank": 0} if kind is None else {"markov_rank": rng.randint(1, 9), "markov_head_type": kind}),
    }


for _seed in range(15):
    DFLASH[f"random {_seed}"] = random_dflash(_seed, False)
    DFLASH2[f"random {_seed}"] = random_dflash(100 + _seed, True)


def rounds(completion: Any) -> list[tuple[int, list[int]]]:
    """(position of the bonus token, drafts) of every round with drafts."""
    bonus, found = len(completion.prompt_token_ids), []
    for stats, drafts in zip(completion.stats.rounds, completion.drafts, strict=True):
        if drafts:
            found.append((bonus, list(drafts)))
        bonus += stats.emitted
    return found


def saved(model: Any, folder: Path) -> str:
    with torch.no_grad():
        enlarge(model.eval(), 3)
    model.save_pretrained(folder)
    return str(folder)


def loaded(folder: str, block_size: int) -> Any:
    """The head with its target, with room for three blocks; the longest prompt comes in chunks where they are short."""
    return wrap(tiny_llama(), folder, max_num_batched_tokens=max(24, 3 * (block_size + 1)))


def compared(wrapped: Any, theirs: Any) -> list[tuple[list[int], list[int]]]:
    """(our drafts, theirs) of every round; theirs: of ids up to the bonus token and the target's states before it."""
    target, found = tiny_llama(), []
    for prompt, completion in zip(PROMPTS, wrapped.generate(PROMPTS, GREEDY), strict=True):
        assert completion.token_ids == hf_greedy(prompt, 16)
        ids = torch.tensor([prompt + completion.token_ids])
        with torch.no_grad():
            states = target(ids, output_hidden_states=True, use_cache=False).hidden_states
            for bonus, ours in rounds(completion):
                found.append((ours, theirs(ids[:, : bonus + 1], [s[:, :bonus] for s in states])[: len(ours)]))
    assert len(found) > 25
    return found


@pytest.mark.parametrize(
    ("name", "kind"), [*(("DFlashDraftModel", k) for k in DFLASH), *(("DFlash2DraftModel", k) for k in DFLASH2)]
)
def test_dflash(name: str, kind: str, tmp_path: Path) -> None:
    dflash = pytest.importorskip("dflash.model", reason="dflash is not installed")
    torch.manual_seed(0)
    own = (DFLASH2 if name == "DFlash2DraftModel" else DFLASH)[kind]
    model = getattr(dflash, name)(Qwen3Config(**{"num_hidden_layers": 2, **SIZES, **own}))
    target, scale = tiny_llama(), own.get("dflash_config", {}).get("input_embedding_scale", 1.0)

    def theirs(ids: torch.Tensor, states: list[torch.Tensor]) -> list[int]:
        length, block = ids.shape[1] - 1, model.block_size
        noise = torch.full((1, block), model.mask_token_id)
        noise[0, 0] = ids[0, -1]
        hidden = model(
            target_hidden=dflash.extract_context_feature(states, model.target_layer_ids),
            noise_embedding=target.get_input_embeddings()(noise) * scale,
            position_ids=torch.arange(length + block)[None],
        )
        if name == "DFlash2DraftModel":
            return model.propose(hidden[:, 1:], ids[:, -1], target.lm_head, 0.0)[0][0].tolist()
        return model.compute_logits(hidden[:, 1:], target.lm_head)[0].argmax(-1).tolist()

    pairs = compared(loaded(saved(model, tmp_path), model.block_size), theirs)
    assert [ours for ours, _ in pairs] == [right for _, right in pairs]


DSPARK: dict[str, Config] = {
    "vanilla": {"markov_rank": 6, "markov_head_type": "vanilla"},
    "gated": {"markov_rank": 6, "markov_head_type": "gated", "target_layer_ids": [-1, 1]},
    "rnn": {"markov_rank": 4, "markov_head_type": "rnn", "num_hidden_layers": 3},
    "dflash": {"markov_rank": 0, "enable_confidence_head": True, "confidence_head_with_markov": False},
    "confidence": {
        "markov_rank": 4,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}

DSPARK |= {f"random {seed}": random_dspark(seed) for seed in range(15)}


@pytest.mark.parametrize("kind", DSPARK)
def test_dspark(kind: str, tmp_path: Path) -> None:
    name = "nemo_automodel.components.speculative.dspark"
    dspark = pytest.importorskip(f"{name}.draft_qwen3", reason="nemo-automodel is not installed")
    common = pytest.importorskip(f"{name}.common")
    torch.manual_seed(0)
    fixed = {"block_size": 5, "mask_token_id": 7, "num_anchors": 8, "target_layer_ids": [0, 2]}
    own = {"enable_confidence_head": False, **fixed, **DSPARK[kind]}
    config = Qwen3Config(
        **{"num_hidden_layers": 2, **SIZES, **own}, architectures=["Qwen3DSparkModel"], attn_implementation="sdpa"
    )
    model = dspark.Qwen3DSparkModel(config)

    def theirs(ids: torch.Tensor, states: list[torch.Tensor]) -> list[int]:
        length, block = ids.shape[1] - 1, model.block_size
        noise = torch.full((1, block), model.mask_token_id)
        noise[0, 0] = ids[0, -1]
        positions, hidden = torch.arange(length + block)[None], model.embed_tokens(noise)
        features = common.extract_context_feature(states, model.target_layer_ids)
        own = {"target_hidden_states": model.hidden_norm(model.fc(features)), "position_ids": positions}
        rotation = model.rotary_emb(hidden, positions)
        for layer in model.layers:
            hidden = layer(hidden_states=hidden, position_embeddings=rotation, **own)
        hidden = model.norm(hidden)
        tokens, _ = model.sample_draft_tokens(
            model.compute_logits(hidden), first_prev_token_ids=ids[:, -1], hidden_states=hidden
        )
        if config.enable_confidence_head:
            before = torch.cat((ids[:, -1:], tokens[:, :-1]), 1)
            right = model.predict_confidence_step(hidden, before if config.confidence_head_with_markov else None)
            scores.append(right.clone())
            torch.testing.assert_close(head.confidence_logits(hidden, before), right, rtol=1e-5, atol=1e-5)
        return tokens[0].tolist()

    wrapped, scores = loaded(saved(model, tmp_path), model.block_size), list[torch.Tensor]()
    head = wrapped.head
    pairs = compared(wrapped, theirs)
    assert [ours for ours, _ in pairs] == [right for _, right in pairs]
    if config.enable_confidence_head:
        assert torch.cat(scores).std() > 0.05, "they depend on the slot"
