"""Models whose sequences are cut over ranks give the numbers of one process: loss, every gradient, norm, weights after three steps.

Each comparison is in float64 to 1e-9, with SGD and without dropout, on rows of very different lengths that no size divides.
"""

from pathlib import Path

import pytest

from phalanx.errors import PlanError, ShapeError
from phalanx.verify import verify_named

PROGRAMS = Path(__file__).with_name("sequence_programs.py")

# Every model and every grid, with each stage of ZeRO, accumulation, recompute and half precision at least once.
COVER = [
    ("tiny-llama", "bf16+ulysses2"),
    ("tiny-llama", "zero3+ulysses2+ring2"),
    ("tiny-qwen3", "zero1+ring2"),
    ("tiny-gpt2", "cp3"),
    ("tiny-gemma2", "ring2"),
    ("tiny-gemma2", "recompute+ulysses2+ring2"),
    ("tiny-gemma3-text", "cp4"),
    ("tiny-bert", "ring3"),
    ("tiny-bert", "zero2+cp2+acc2"),
    ("tiny-roberta", "fp16+ring2"),
    ("tiny-opt", "ulysses2"),
    ("tiny-olmoe", "dp2+ep2+ring2"),
    ("tiny-llama", "tp2+sp+ulysses2"),
    ("tiny-gemma2", "tp2+ring2"),
    ("own_plain", "ring2"),
    ("own_plain", "recompute+zero3+ulysses2"),
    ("own_loss", "cp2"),
    ("own_encoder", "ulysses2+ring2"),
    ("llama_packed", "ring2"),
    ("llama_packed", "ulysses2+ring2"),
    ("gemma2_packed", "ring3"),
    ("llama_left", "ring2"),
    ("gemma2_left", "cp4"),
    ("opt_left", "ring2"),
    ("llama_right", "ulysses2"),
    ("llama_masked", "ring2"),
    ("llama_biased", "ulysses2+ring2"),
    ("llama_short", "ring4"),
    ("llama_criterion", "ring2"),
    ("mixture", "cp3"),
    ("own_one", "ulysses2"),
    ("own_three", "ulysses2+ring2"),
    ("llama_heads", "ring2"),
    ("gemma2_masks", "ulysses2+ring2"),
    ("values_masked", "ring2"),
    ("bart", "ring2"),
]
MODELS = ("tiny-llama", "tiny-qwen3", "tiny-gpt2", "tiny-gemma2", "tiny-gemma3-text", "tiny-bert", "tiny-olmoe")
PROGRAM_MODELS = ("own_plain", "llama_packed", "llama_left")
GRIDS = ("ulysses2", "ring2", "cp3", "cp4", "ulysses2+ring2", "ulysses2+ring4", "ulysses4+ring2")
STRATEGIES = ("", "tp2+", "tp2+sp+zero1+", "zero1+", "zero3+", "recompute+", "selective+", "dp2+zero2+")
# Attention that every tensor rank computes whole: one norms queries over all heads, one counts its heads by a constant of its file.
UNDIVIDED = ("tiny-olmoe", "own_plain")
CELLS = [
    (model, f"{strategy}{grid}")
    for model in (*MODELS, *PROGRAM_MODELS)
    for grid in GRIDS
    for strategy in STRATEGIES
    if not (strategy[:3] in ("dp2", "tp2") and grid in ("ulysses2+ring4", "ulysses4+ring2"))
]
REFUSED = [(model, plan) for model, plan in CELLS if model in UNDIVIDED and "+sp+" in plan]
MATRIX = [cell for cell in CELLS if cell not in REFUSED]


def check(model, plan):
    name = model if model.startswith("tiny-") else f"{PROGRAMS}:{model}"
    report = verify_named(name, plan)
    assert report.ok, str(report)
    assert report.worst_relative_error < 1e-9


@pytest.mark.parametrize(("model", "plan"), COVER)
def test_parity(model, plan):
    check(model, plan)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "plan"), MATRIX)
def test_parity_in_every_cell(model, plan):
    check(model, plan)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "refused"), REFUSED)
def test_undivided_attention_is_refused_under_sp(model, refused):
    with pytest.raises(PlanError, match=r"sp cuts the sequence, and \S*(o_proj|outward) takes in other tokens of .*Try: tp2 without sp"):
        check(model, refused)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("own_softmax", r"blocks\.0\.attention mixes tokens"),
        ("own_mask", r"blocks\.0\.attention calls attention with a mask of shape"),
        ("own_convolution", r"blocks\.0\.convolution mixes tokens|blocks\.0 mixes tokens"),
        ("own_recurrent", "recurrent mixes tokens"),
        ("own_pooled", "Transformer mixes tokens"),
        ("own_sliced", "Transformer mixes tokens"),
        ("own_gated", "Transformer mixes tokens"),
        ("values_packed", r"body\S* mixes tokens"),
        ("bart_masked", r"decoder\S* mixes tokens"),
        ("llama_overlong", r"attention_mask has the shape \(3, 5\)"),
        ("bert_classes", "bert.pooler mixes tokens"),
        ("llama_classes", "LlamaForSequenceClassification mixes tokens"),
        ("tiny-bloom", r"transformer.* mixes tokens"),
        ("tiny-t5", "position_bias"),
        ("tiny-vit", r"pixel_values .* has no entry with a token dimension"),
    ],
)
def test_what_mixes_tokens_elsewhere_is_refused_by_name(model, words):
    with pytest.raises((PlanError, ShapeError), match=words):
        check(model, "ring2")
