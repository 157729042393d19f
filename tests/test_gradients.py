"""`linear` against torch's autograd in fp64: values, what is computed, what is kept."""

from itertools import product

import pytest
import torch
from numerics import SNR_FLOOR, assert_close, snr_db
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

import turbo_ops
from turbo_ops import Cast, Gemm, Recipe
from turbo_ops.dispatch import Op

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TENSOR, ROW = Cast("e4m3", (0, 0)), Cast("e4m3", (1, 0))
TILE, SQUARE, MX = Cast("e4m3", (1, 128)), Cast("e4m3", (128, 128)), Cast("e4m3", (1, 32), "e8m0")
WIDE = Cast("e5m2", (0, 0))
RECIPES = {
    "none": Recipe(),
    "tensorwise": Recipe(*[Gemm(TENSOR, TENSOR)] * 3),
    "rowwise": Recipe(*[Gemm(ROW, ROW)] * 3),
    "rowwise_hp_wgrad": Recipe(Gemm(ROW, ROW), Gemm(ROW, ROW)),
    "blockwise": Recipe(Gemm(TILE, SQUARE), Gemm(TILE, SQUARE), Gemm(TILE, TILE)),
    "mx": Recipe(*[Gemm(MX, MX)] * 3),
    "hybrid": Recipe(Gemm(TENSOR, TENSOR), Gemm(WIDE, TENSOR), Gemm(WIDE, TENSOR)),
}
BLOCKWISE = RECIPES["blockwise"]
SHAPES = [  # of x, and the output width
    ((1,), 1),
    ((33,), 7),
    ((5, 16), 9),
    ((2, 3, 5, 40), 24),
    ((1, 257), 129),
    ((0, 32), 16),
    ((3, 0), 4),
    ((3, 5), 0),
    ((2, 0, 8), 3),
]
needs = pytest.mark.parametrize("needs", list(product((True, False), repeat=3))[:-1], ids=str)


@pytest.fixture
def reference(device: torch.device):
    """Mechanics do not depend on the backend, and the interpreter is 100 times slower than the reference."""
    pins = {} if device.type == "cuda" else dict.fromkeys(("quantize", "gemm", "rms_norm"), "reference")
    with turbo_ops.force(**pins):
        yield


def draw(shape: tuple, out: int, device, dtype=torch.float32, needs=(True, True, True)) -> list[Tensor]:
    sizes = (shape, (out, shape[-1]), (out,))
    return [
        torch.randn(size).to(device, dtype).requires_grad_(need)  # the same values on every device
        for size, need in zip(sizes, needs, strict=True)
    ]


def results(function, leaves: list[Tensor], grad: Tensor | None = None) -> list[Tensor]:
    """The output and the gradients of the leaves that want one."""
    y = function(*leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grad = torch.randn_like(y) if grad is None else grad
    return [y, *torch.autograd.grad(y, wanted, grad)]


def truth(function, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    doubles = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
    return results(function, doubles, grad.double())


def floor_of(recipe: Recipe) -> float:
    if not recipe.casts:
        return 100.0  # fp32 against fp64
    dtypes = {c.dtype for g in (recipe.fprop, recipe.dgrad, recipe.wgrad) for c in (g.lhs, g.rhs) if c}
    return min(SNR_FLOOR[dtype] for dtype in dtypes)


def linear(recipe: Recipe):
    return lambda x, weight, bias=None: turbo_ops.linear(x, weight, bias, recipe)


def check_snr(actual: list[Tensor], expected: list[Tensor], floor: float) -> None:
    assert [a.shape for a in actual] == [e.shape for e in expected]
    ratios = [snr_db(a, e) for a, e in zip(actual, expected, strict=True)]
    assert min(ratios) >= floor, f"SNR {ratios} dB, the floor is {floor}"


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_linear_snr(name: str, compiled: bool, device) -> None:
    """With whatever backends this machine prefers: Triton in the interpreter on a CPU."""
    leaves, recipe = draw((2, 70, 200), 136, device), RECIPES[name]
    grad = torch.randn(2, 70, 136, device=device)
    function = linear(recipe)
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    check_snr(results(function, leaves, grad), truth(functional.linear, leaves, grad), floor_of(recipe))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("shape", "out"), SHAPES, ids=str)
def test_linear_takes_any_extents(name: str, shape: tuple, out: int, device, reference) -> None:
    leaves, recipe = draw(shape, out, device), RECIPES[name]
    grad = torch.randn(*shape[:-1], out).to(device)
    actual, expected = results(linear(recipe), leaves, grad), truth(functional.linear, leaves, grad)
    few = 3.0  # dB: fewer than a hundred products do not average to the floor
    check_snr(actual, expected, floor_of(recipe) - few)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_linear_without_casts_is_torch(dtype: torch.dtype, device, reference) -> None:
    leaves = draw((4, 33), 17, device, dtype)
    grad = torch.randn(4, 17, device=device).to(dtype)
    actual, expected = results(linear(Recipe()), leaves, grad), results(functional.linear, leaves, grad)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close(ours, theirs, 1e-5 if dtype == torch.float32 else 2e-2, "linear")


@pytest.fixture
def calls(environment) -> list[tuple]:
    """(op, shapes of its tensors) of every op that runs."""
    seen, run = [], Op._run

    def spy(op: Op, *args: object):
        seen.append((op.name, *(tuple(arg.shape) for arg in args if isinstance(arg, Tensor))))
        return run(op, *args)

    turbo_ops.reset()
    environment.setattr(Op, "_run", spy)
    environment.setattr(Op, "bind", lambda op, args: lambda *rest: op._run(*rest))
    return seen


@needs
@pytest.mark.parametrize("name", ["none", "blockwise", "rowwise_hp_wgrad"])
def test_linear_computes_what_is_asked(name: str, needs: tuple, device, reference, calls) -> None:
    """A frozen weight pays no wgrad, a frozen input no dgrad, and neither is cast for it."""
    M, K, N = 6, 40, 24
    leaves = draw((M, K), N, device, needs=needs)
    y = linear(RECIPES[name])(*leaves)
    forward_casts = [call for call in calls if call[0].startswith("quantize")]
    calls.clear()
    actual = torch.autograd.grad(y, [leaf for leaf in leaves if leaf.requires_grad], torch.randn_like(y))
    assert len(actual) == sum(needs)
    gemms = [call[1:3] for call in calls if call[0] == "gemm"]
    dgrad, wgrad = ((M, N), (K, N)), ((N, M), (K, M))
    assert gemms == [gemm for gemm, need in ((dgrad, needs[0]), (wgrad, needs[1])) if need]
    if name == "blockwise":
        # x and weight once each along `in`, x.t() for wgrad and weight.t() for dgrad only where needed; a
        # frozen weight keeps one orientation, and backward casts the other
        frozen = needs[0] and not needs[1]
        assert len(forward_casts) == 2
        assert sum(call[0] == "quantize_both" for call in forward_casts) == needs[1] + (needs[0] and needs[1])
        assert len(calls) - len(gemms) == int(any(needs[:2])) + frozen


def test_linear_in_inference_mode(device, reference, calls) -> None:
    leaves = draw((1, 40), 24, device)
    with torch.inference_mode():
        y = linear(BLOCKWISE)(*leaves)
    assert y.shape == (1, 24)
    assert [call[0] for call in calls] == ["quantize", "quantize", "gemm"]


@pytest.mark.parametrize("kind", ["transposed", "expanded", "sliced", "channels last"])
def test_linear_takes_any_strides(kind: str, device, reference) -> None:
    x, weight, bias = draw((6, 8, 40), 24, device)
    grad = torch.randn(6, 8, 24, device=device)
    views = {
        "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        "expanded": lambda t: t[:1, :1].expand(t.shape),
        "sliced": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
        "channels last": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    }
    x = views[kind](x.detach()).requires_grad_()
    grad = views[kind](grad)
    before = grad.clone()
    leaves = [x, weight, bias]
    check_snr(results(linear(BLOCKWISE), leaves, grad), truth(functional.linear, leaves, grad), 22.0)
    assert torch.equal(grad, before), "backward wrote into grad_output"


def test_linear_takes_a_broadcast_gradient(device, reference) -> None:
    """sum().backward() hands down an expanded scalar: every stride is 0."""
    leaves = draw((3, 5, 40), 24, device)
    grads = torch.autograd.grad(linear(BLOCKWISE)(*leaves).sum(), leaves)
    check_snr(list(grads), truth(functional.linear, leaves, torch.ones(3, 5, 24, device=device))[1:], 25.0)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["none", "blockwise"])
def test_linear_under_autocast(name: str, x_dtype: torch.dtype, device, reference) -> None:
    x, weight, bias = draw((4, 40), 24, device)
    x = x.detach().to(x_dtype).requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        y = linear(RECIPES[name])(x, weight, bias)
    grads = torch.autograd.grad(y, [x, weight, bias], torch.randn_like(y))
    assert y.dtype == torch.bfloat16
    assert [grad.dtype for grad in grads] == [x_dtype, torch.float32, torch.float32]
    expected = functional.linear(x.double(), weight.double(), bias.double())
    assert snr_db(y, expected) >= 25


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_linear_shows_nan_and_inf(name: str, value: float, device, reference) -> None:
    """What is not finite in x is not finite in the output and grad_weight, whatever block it fell in."""
    x, weight, bias = draw((6, 40), 24, device)
    x.data[2, 3] = value
    y, _, grad_weight, _ = results(linear(RECIPES[name]), [x, weight, bias])
    assert not y[2].isfinite().any()
    assert not grad_weight[:, 3].isfinite().any()


@pytest.mark.parametrize("name", RECIPES)
def test_linear_of_zeros_is_finite(name: str, device, reference) -> None:
    x, weight, bias = draw((6, 40), 24, device)
    x.data[:3], weight.data[:5] = 0, 0
    y, *grads = results(linear(RECIPES[name]), [x, weight, bias], torch.zeros(6, 24, device=device))
    assert torch.equal(y[:3], bias.expand(3, 24))
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "mx", "hybrid"])
def test_linear_saves_one_byte_an_element(name: str, device, reference) -> None:
    M, K, N = 256, 512, 128
    x, weight, _ = draw((M, K), N, device)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        linear(RECIPES[name])(x, weight)
    of_elements = [t for t in saved.values() if t.numel() >= min(M, N) * K]
    assert sorted((t.numel(), t.element_size()) for t in of_elements) == [(N * K, 1), (M * K, 1)]
    assert sum(t.nbytes for t in saved.values()) <= 1.15 * (M + N) * K  # scales: 4 bytes per 128, or 1 per 32


def test_linear_says_which_dtypes_differ(device) -> None:
    x, weight, bias = draw((4, 8), 3, device)
    with pytest.raises(ValueError, match=r"x torch.bfloat16, weight torch.float32, bias torch.float32"):
        turbo_ops.linear(x.bfloat16(), weight, bias)
    with pytest.raises(ValueError, match=r"bias torch.float16"):
        turbo_ops.linear(x, weight, bias.half())
    with pytest.raises(ValueError, match=r"x \(4, 8\) and weight \(8, 3\)"):
        turbo_ops.linear(x, weight.t())
    with pytest.raises(ValueError, match=r"bias.*\(2,\)"):
        turbo_ops.linear(x, weight, bias[:2])


@pytest.mark.parametrize("name", ["none", "blockwise", "mx"])
def test_linear_compiles_once_for_all_batches(name: str, device, reference) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(linear(RECIPES[name]), fullgraph=True, backend=counter)
    _, weight, bias = draw((1, 64), 24, device)
    for batch in (150, 260, 515):  # more than one block each: a scale extent of 1 is a class of its own
        x = torch.randn(batch, 64, device=device, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        leaves, grad = [x, weight, bias], torch.randn(batch, 24, device=device)
        actual, expected = results(compiled, leaves, grad), results(linear(RECIPES[name]), leaves, grad)
        for ours, eager in zip(actual, expected, strict=True):
            assert_close(ours, eager, 1e-5, f"batch {batch}")
    assert counter.frame_count == 1


def test_linear_through_inductor(device, reference) -> None:
    torch._dynamo.reset()
    leaves, grad = draw((6, 64), 24, device), torch.randn(6, 24, device=device)
    compiled = torch.compile(lambda *args: linear(BLOCKWISE)(*args).relu(), fullgraph=True)
    eager = results(lambda *args: linear(BLOCKWISE)(*args).relu(), leaves, grad)
    for ours, expected in zip(results(compiled, leaves, grad), eager, strict=True):
        assert_close(ours, expected, 1e-5, "inductor")


@pytest.mark.deterministic
@pytest.mark.parametrize("name", RECIPES)
def test_linear_repeats_itself(name: str, device) -> None:
    leaves = draw((130, 200), 136, device, torch.bfloat16)
    grad = torch.randn(130, 136, device=device).bfloat16()
    first, second = (results(linear(RECIPES[name]), leaves, grad) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert_close(one, other, 0.0, "second run")


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int64], ids=str)
def test_linear_refuses_other_types(dtype: torch.dtype, device) -> None:
    x, weight = torch.ones(2, 4, device=device).to(dtype), torch.ones(3, 4, device=device).to(dtype)
    with pytest.raises(ValueError, match=f"linear: x is {dtype}: give fp32, bf16 or fp16"):
        turbo_ops.linear(x, weight)


def test_a_second_derivative_is_refused(device, reference) -> None:
    """What backward saved would count as constant, and the result be wrong in silence."""
    x = torch.randn(4, 8, device=device, requires_grad=True)
    y = turbo_ops.linear(x, torch.randn(4, 8, device=device))
    with pytest.raises(RuntimeError, match=r"turbo_ops\.linear is differentiable once"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
