"""Reads the source of a model's forward to learn how its loss is formed; nothing is run."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import dataclass

from torch import nn

LOSS_CALL = re.compile(
    r"(CrossEntropyLoss|cross_entropy|NLLLoss|nll_loss|MSELoss|mse_loss|BCE\w*Loss|binary_cross_entropy\w*|CTCLoss|\w*l1_loss)$"
)
# labels[..., 1:], targets[:, 1:] and the like: the forward moves the labels by one position itself.
LABEL_SHIFT = re.compile(r"(label|target)\w*\[(\.\.\.|:),? ?[^\]]*1:\]")
# The two ways in which forwards drop labels whose attention mask is 0 before the mean is taken.
LABEL_MASK = re.compile(r"shift_attention_mask|active_loss")


@dataclass(frozen=True, kw_only=True)
class LossSource:
    """What a forward does about its loss.

    `calls_seam`: it calls `self.loss_function`; `passes_keywords`: with its own keywords, so that num_items_in_batch arrives;
    `is_plain_mean`: no loss it calls is given weights, a reduction, or an ignored label of its own;
    `pre_shifted`: with labels it calls already shifted; `written`: names of losses it calls itself; `labels`: its label arguments.
    """

    calls_seam: bool = False
    passes_keywords: bool = False
    pre_shifted: bool = False
    written: frozenset[str] = frozenset()
    shifts_labels: bool = False
    masks_labels: bool = False
    segmentation: bool = False
    is_plain_mean: bool = True
    labels: tuple[str, ...] = ()

    @property
    def found_loss(self) -> bool:
        return self.calls_seam or bool(self.written)


def read_loss_source(model: nn.Module) -> LossSource:
    """What can be read from the forward of the model's class; the empty answer where its source is not at hand."""
    function = inspect.unwrap(type(model).forward)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return LossSource()
    text = ast.unparse(_without_docstring(tree.body[0]))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    seams = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "loss_function"]
    keywords = {keyword.arg for call in seams for keyword in call.keywords}
    return LossSource(
        calls_seam=bool(seams),
        passes_keywords=None in keywords or "num_items_in_batch" in keywords,
        pre_shifted="shift_labels" in keywords,
        written=frozenset(_written_losses(calls)) | frozenset(_loss_modules(model, text)),
        shifts_labels=bool(LABEL_SHIFT.search(text)),
        masks_labels=bool(LABEL_MASK.search(text)),
        segmentation="semantic_loss_ignore_index" in text,
        is_plain_mean=not any(_bends_mean(call) for call in calls),
        labels=tuple(name for name in inspect.signature(function).parameters if re.search(r"label|target|start_positions", name)),
    )


def _without_docstring(function: ast.stmt) -> ast.stmt:
    if isinstance(function, ast.FunctionDef) and ast.get_docstring(function) is not None:
        function.body = function.body[1:] or [ast.Pass()]
    return function


def _written_losses(calls: list[ast.Call]) -> set[str]:
    return {match.group(1) for call in calls if (match := LOSS_CALL.search(ast.unparse(call.func)))}


def _bends_mean(call: ast.Call) -> bool:
    """Whether a call of a loss says something that makes it other than a mean over labels that are not -100."""
    if not LOSS_CALL.search(ast.unparse(call.func)):
        return False
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    ignored, reduction = given.get("ignore_index", "-100"), given.get("reduction", "'mean'")
    return given.get("weight", "None") != "None" or reduction != "'mean'" or ignored != "-100"


def _loss_modules(model: nn.Module, text: str) -> set[str]:
    """Losses that are modules of the model and that its forward calls (`self.loss_fct(...)`)."""
    children = [(name, child) for name, child in model.named_children() if isinstance(child, nn.modules.loss._Loss)]
    return {type(child).__name__ for name, child in children if f"self.{name}(" in text}


def find_speaker(model: nn.Module) -> tuple[nn.Module, LossSource]:
    """The module whose forward forms the loss: the model itself, or the one `transformers` model that it wraps."""
    source = read_loss_source(model)
    if source.found_loss:
        return model, source
    for module in model.modules():
        if module is not model and is_pretrained(module):
            inner = read_loss_source(module)
            if inner.found_loss:
                return module, inner
    return model, source


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module is a `transformers` model (told by name, so that nothing is imported for other models)."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__)
