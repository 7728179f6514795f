"""After a run, in one plain process without Phalanx's engine: reload the model, judge it again, let it write, draw the curve."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from phalanx.data.windows import TokenWindows
from phalanx.errors import CheckpointError, ConfigError
from phalanx.log import get_logger
from phalanx.train.evaluate import Score, plain_loss, score
from phalanx.train.folder import Folder
from phalanx.train.picture import draw_loads, draw_losses
from phalanx.train.recipe import Recipe, SampleSettings
from phalanx.train.text import encode, read_corpus

# A reloaded model sums in another order than many ranks did.
LOSS_TOLERANCE = 1e-4


def review(recipe: Recipe) -> dict[str, Any]:
    """Completes the summary of a finished run with the reloaded model's loss, a sample of its text and the picture.

    Raises: CheckpointError where the reloaded model does not predict the held-out text as the trained one did.
    """
    folder = Folder(recipe.folder())
    summary = json.loads(folder.summary.read_text())
    disable_progress_bar()  # weights of this size are there at once
    model = AutoModelForCausalLM.from_pretrained(folder.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder.model)
    reloaded = judge(recipe, model, tokenizer)
    summary["reloaded"] = {"loss": reloaded.loss, "bits_per_byte": reloaded.bits_per_byte}
    trained = summary["validation"]["loss"]
    if not math.isclose(reloaded.loss, trained, rel_tol=LOSS_TOLERANCE):
        raise CheckpointError(
            f"the model in {folder.model} has a validation loss of {reloaded.loss:.6f} when reloaded, {trained:.6f} before",
            allowed=f"a relative difference of {LOSS_TOLERANCE}",
        )
    folder.sample.write_text(write_sample(model, tokenizer, recipe.sample, recipe.run.seed), encoding="utf-8")
    draw(folder)
    folder.summary.write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def judge(recipe: Recipe, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> Score:
    """Validation as the run did it, in this process alone."""
    corpus = read_corpus(recipe)
    windows = TokenWindows(encode(tokenizer.backend_tokenizer, corpus.validation), recipe.batch.tokens)
    return score(plain_loss(model), DataLoader(windows, batch_size=recipe.batch.rows), corpus.validation_bytes)


def write_sample(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, settings: SampleSettings, seed: int) -> str:
    """Text that the model writes after a prompt; the same each time for a seed."""
    prompt = tokenizer(settings.prompt, return_tensors="pt").input_ids
    choice: dict[str, Any] = {"do_sample": True, "temperature": settings.temperature} if settings.temperature else {"do_sample": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokens = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=settings.tokens,
            pad_token_id=tokenizer.eos_token_id,
            use_cache=True,
            **choice,
        )
    return tokenizer.decode(tokens[0], skip_special_tokens=True) + "\n"


def draw(folder: Folder) -> None:
    """The loss curve and the loads of experts, or a word on why there is none."""
    try:
        draw_losses(folder.events, folder.picture)
        draw_loads(folder.events, folder.loads_picture)
    except ConfigError as error:
        get_logger().warning("no picture: %s", error)


def describe(summary: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """The summary as (name, value) rows for people."""
    validation, reloaded = summary["validation"], summary["reloaded"]
    rows = [
        ("model", f"{summary['parameters']:,} parameters, plan {summary['plan']} on {summary['world']} processes"),
        ("validation", f"{validation['bits_per_byte']:.4f} bits per byte over {validation['bytes']:,} held-out bytes"),
        ("reloaded", f"{reloaded['bits_per_byte']:.4f} bits per byte in a single process"),
        ("speed", f"{summary['tokens_per_s']:,.0f} tokens/s, {summary['steps']} steps in {summary['train_s']:.0f} s"),
    ]
    if "experts" in summary:
        evenness = summary["experts"]["entropy"].values()
        dropped = summary["experts"]["dropped"]
        rows.append(("experts", f"evenness {min(evenness):.3f} to {max(evenness):.3f} (1: all alike), {dropped:,.0f} choices dropped"))
    rows += [(f"memory of rank {rank}", text) for rank, text in enumerate(map(memory_line, summary["memory"]))]
    return [*rows, ("files", f"{folder}: sample.txt, loss.png, events.jsonl, model/, checkpoints/")]


def memory_line(memory: dict[str, dict[str, int] | None]) -> str:
    """What a rank kept and reached, beside what was predicted."""
    measured, predicted = memory["measured"], memory["predicted"]
    if measured is None or predicted is None:
        return "not measured"
    words = {"kept": "kept", "peak": "at the peak"}
    return ", ".join(f"{measured[name] / 1e6:.1f} MB {word} ({predicted[name] / 1e6:.1f} predicted)" for name, word in words.items())
