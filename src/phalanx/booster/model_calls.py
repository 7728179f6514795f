"""What a boosted model is asked beside its forward: modes, generation, forgetting gradients, and copies of itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from phalanx.errors import ConfigError

if TYPE_CHECKING:
    from phalanx.booster.training import Training


def take_over_calls(training: Training, *, gathers: bool) -> None:
    """Lets calls of the model itself mean what they mean in one process, or refuses them.

    They are set on this one object, whatever its class. `gathers`: generation needs parameters that other ranks hold.
    """
    own = training.model.__dict__
    if gathers and hasattr(training.model, "generate"):
        own["generate"] = _on_whole_parameters(training, training.model.generate)
    own["zero_grad"] = lambda set_to_none=True: training.clear()
    own["__deepcopy__"] = own["__reduce_ex__"] = _refuse_copy


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode while inside; then each module is as it was, since a person may hold some of them in evaluation for good."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _on_whole_parameters(training: Training, generate: Any) -> Any:
    """Generation on whole parameters: ranks may then run different numbers of passes."""

    def gathered_generate(*args: Any, **kwargs: Any) -> Any:
        with training.gathered():
            return generate(*args, **kwargs)

    return gathered_generate


def _refuse_copy(_: Any) -> Any:
    raise ConfigError(
        "a boosted model was copied or pickled: its parameters and hooks belong to the engine that shards them",
        allowed="copies made before boost, booster.full_state_dict() and booster.save_model(path)",
        remedy="copy.deepcopy(model) before booster.boost(model)",
    )
