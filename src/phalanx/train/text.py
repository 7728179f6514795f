"""The text of a run: reading it, holding a part of it back, the byte-pair tokenizer trained on the rest, and the tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from phalanx.data.text import read_text
from phalanx.train.recipe import Recipe

END = "<|end|>"  # stands before and after every text


@dataclass(frozen=True)
class Corpus:
    """The text of a run, cut in two."""

    training: list[str]
    validation: list[str]

    @property
    def validation_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.validation)


def read_corpus(recipe: Recipe) -> Corpus:
    """All texts of a recipe, with the last part of each held out.

    Raises: ConfigError for a file that is missing, empty or not UTF-8 text.
    """
    return Corpus(*hold_out([read_text(path) for path in recipe.text_paths()], recipe.text.held_out))


def hold_out(texts: Sequence[str], fraction: float) -> tuple[list[str], list[str]]:
    """Splits every text into its beginning, for training, and about its last `fraction`, for validation, at the end of a paragraph."""
    training, validation = [], []
    for text in texts:
        cut = len(text) - int(len(text) * fraction)
        paragraph = text.find("\n\n", cut)
        cut = paragraph + 2 if fraction and 0 <= paragraph < len(text) - 2 else cut
        training.append(text[:cut])
        if text[cut:]:
            validation.append(text[cut:])
    return training, validation


def fingerprint(texts: Sequence[str], vocabulary: int) -> str:
    """Names what a tokenizer was trained on."""
    digest = hashlib.sha256(str(vocabulary).encode())
    for text in texts:
        digest.update(b"\0" + text.encode())
    return digest.hexdigest()[:16]


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """A byte-level byte-pair tokenizer: any text can be encoded and comes back byte for byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_for(texts: Sequence[str], vocabulary: int, folder: Path) -> Tokenizer:
    """The tokenizer of a run: trained once and kept in `folder` under the name of what it was trained on."""
    path = folder / f"tokenizer-{fingerprint(texts, vocabulary)}.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer(texts, vocabulary)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    tokenizer.save(str(unfinished))
    unfinished.replace(path)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> torch.Tensor:
    """All texts as one row of tokens with the end token before, between and after, so that even the first token of a text has a past.

    Shapes: (tokens,) int64.
    """
    end = tokenizer.token_to_id(END)
    tokens = [end]
    for text in texts:
        tokens += tokenizer.encode(text).ids
        tokens.append(end)
    return torch.tensor(tokens, dtype=torch.int64)


def export_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the tokenizer beside a saved model, in the form `transformers` loads."""
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(str(folder))
