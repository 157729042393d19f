"""What a recipe remembers beside a checkpoint: amax histories. The state_dict stays nn.Linear's."""

from torch import Tensor, nn

import turbo_ops
from turbo_nn.linear import Linear


class RecipeState:
    """The recipe's state of a model as an object with state_dict and load_state_dict.

    For `accelerator.register_for_checkpointing(RecipeState(model))`: a run then resumes bit for bit.
    """

    def __init__(self, model: nn.Module):
        self.model = model

    def state_dict(self) -> dict[str, Tensor]:
        return recipe_state(self.model)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        load_recipe_state(self.model, state)


def recipe_state(model: nn.Module) -> dict[str, Tensor]:
    """fqn -> amax history [3, H + 1] on the CPU, of every layer that has one; copies. Empty without any."""
    return {
        fqn: module.amax_history.detach().to("cpu", copy=True)
        for fqn, module in model.named_modules()
        if isinstance(module, Linear) and module.amax_history is not None
    }


def load_recipe_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Put the histories of `recipe_state` back. Patch the model with the same recipe first.

    ValueError, with nothing changed, for a name that is no layer with a history of that length.
    """
    layers = {fqn: module for fqn, module in model.named_modules() if isinstance(module, Linear)}
    for fqn, history in state.items():
        steps = layers[fqn].recipe.history if fqn in layers else 0
        if history.shape != (3, steps + 1):
            have = (
                f"has a recipe with a history of {steps} steps" if fqn in layers else "is no turbo_nn.Linear"
            )
            raise ValueError(
                f"load_recipe_state: {fqn!r} {have}, the state {tuple(history.shape)}: "
                "patch the model with the recipe that it was saved with"
            )
    for fqn, history in state.items():
        layer = layers[fqn]
        layer.amax_history = turbo_ops.new_history(layer.recipe.history, layer.weight.device)
        turbo_ops.restore_history(layer.amax_history, history)
