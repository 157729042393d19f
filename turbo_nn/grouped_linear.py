"""A linear layer for each expert, over rows in the experts' order."""

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import turbo_ops
from turbo_nn.recipes import RecipeLike, layer_recipe, name_of
from turbo_ops import Recipe, grouped_gemm
from turbo_ops.arch import fp8_dtype
from turbo_ops.grouped_linear import recipe_problem as problem_of


class GroupedLinear(nn.Module):
    """E linear layers in one product: x [R, in], ends [E] int64 -> [R, out].

    Rows ends[e - 1] to ends[e] go through weight [E, out, in] and bias [E, out] of expert e; those from the
    last end on are zero. `turbo_ops.moe_permute` makes rows and ends, align is what it was given.
    recipe: as `Linear`'s. ValueError for an unknown one, and for one with an amax history or MX blocks.
    """

    recipe: Recipe

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: RecipeLike = "bf16",
    ):
        super().__init__()
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.recipe = checked_recipe("GroupedLinear", recipe)
        shape = num_experts, out_features, in_features
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        shift = torch.empty(shape[:2], device=device, dtype=dtype) if bias else None
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None if shift is None else nn.Parameter(shift))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each expert starts as an nn.Linear."""
        start_as_linear(self.weight, self.bias)

    def forward(self, x: Tensor, ends: Tensor, align: int = 1) -> Tensor:
        resident = "_is_fsdp_managed_module" not in self.__dict__
        return turbo_ops.grouped_linear(
            x, self.weight, ends, self.bias, self.recipe, align=align, resident=resident
        )

    def extra_repr(self) -> str:
        extents = f"num_experts={self.num_experts}, in_features={self.in_features}"
        layer = f"out_features={self.out_features}, bias={self.bias is not None}"
        return f"{extents}, {layer}, recipe={name_of(self.recipe)}"


def start_as_linear(weight: Tensor, bias: Tensor | None) -> None:
    """Draw weight [E, out, in] and bias [E, out] as nn.Linear does."""
    bound = weight.shape[2] ** -0.5 if weight.shape[2] else 0.0
    for parameter in (weight, bias):
        if parameter is not None:
            nn.init.uniform_(parameter, -bound, bound)


def recipe_problem(recipe: Recipe) -> str | None:
    """Why experts cannot have the recipe."""
    problem = problem_of(recipe)
    return problem and f"experts have no recipe {name_of(recipe)}: {problem}"


def checked_recipe(who: str, recipe: RecipeLike) -> Recipe:
    """`layer_recipe`, and ValueError for one that experts cannot have."""
    found = layer_recipe(recipe)
    if problem := recipe_problem(found):
        raise ValueError(f"{who}: {problem}")
    return found


def grouped_backends(weight: Tensor, recipe: Recipe, rows: int = 4096) -> str:
    """What `turbo_ops.grouped_linear` runs on for weight [E, out, in], forward. Allocates nothing."""
    (experts, out, width), device, dtype = weight.shape, weight.device, weight.dtype
    lhs, rhs, blocks = recipe.fprop.lhs, recipe.fprop.rhs, -(-width // 128)
    with FakeTensorMode():
        x, fake = (torch.empty(shape, dtype=dtype, device=device) for shape in ((rows, width), weight.shape))
        fake = fake if weight.is_contiguous() else fake.transpose(1, 2).contiguous().transpose(1, 2)
        ends, scales = torch.empty(experts, dtype=torch.int64, device=device), [None, None]
        if lhs is not None and rhs is not None:
            x, fake = (t.to(fp8_dtype(cast.dtype, device)) for t, cast in ((x, lhs), (fake, rhs)))
            of_x = {(0, 0): (experts,), (1, 0): (rows, 1)}.get(lhs.block, (rows, blocks))
            of_weight = {(0, 0): (experts,), (1, 0): (experts, out, 1)}
            shapes = of_x, of_weight.get(rhs.block, (experts, -(-out // 128), blocks))
            scales = [torch.empty(shape, device=device) for shape in shapes]  # type: ignore[misc]
        chosen = grouped_gemm.choose(x, fake, ends, *scales, None, dtype, recipe.fprop.fast_accum)
        return f"grouped_gemm:{chosen.name}"
