"""`rms_norm`, `add_rms_norm` and `swiglu` against torch's autograd in fp64."""

import pytest
import torch
from numerics import assert_close
from torch import Tensor
from torch.nn import functional

import turbo_ops


@pytest.fixture(params=[False, True], ids=["eager", "compiled"])
def compiled(request: pytest.FixtureRequest):
    """A compiler cannot trace the allocators that poison memory."""
    torch._dynamo.reset()
    if not request.param:
        request.getfixturevalue("poisoned_memory")
    return request.param


@pytest.fixture
def reference(device: torch.device):
    """Mechanics do not depend on the backend, and the interpreter is 100 times slower than the reference."""
    pins = {} if device.type == "cuda" else dict.fromkeys(("rms_norm", "swiglu", "rope"), "reference")
    with turbo_ops.force(**pins):
        yield


def results(function, leaves: list[Tensor], *grads: Tensor, **options) -> list[Tensor]:
    """The outputs and the leaves' gradients."""
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [*outputs, *torch.autograd.grad(outputs, leaves, grads, **options)]


def truth(function, leaves: list[Tensor], *grads: Tensor) -> list[Tensor]:
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    return results(function, doubles, *(grad.double() for grad in grads))


VARIANTS = {"torch": {}, "gemma": {"offset": 1.0}, "llama": {"round_first": True}}


def norm(x: Tensor, weight: Tensor, *, offset: float = 0.0, round_first: bool = False) -> Tensor:
    """The definition; in fp64 the moment of rounding does not show."""
    return functional.rms_norm(x, x.shape[-1:], None, 1e-6) * (weight + offset)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(1,), (7, 33), (0, 16), (2, 3, 4, 64), (1, 1)], ids=str)
def test_rms_norm(shape: tuple, variant: str, compiled: bool, device) -> None:
    options = VARIANTS[variant]
    x = torch.randn(shape, device=device, requires_grad=True)
    weight = torch.randn(shape[-1], device=device, requires_grad=True)
    grad = torch.randn(shape, device=device)
    before = grad.clone()
    function = lambda x, weight: turbo_ops.rms_norm(x, weight, 1e-6, **options)  # noqa: E731
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    actual = results(function, [x, weight], grad)
    expected = truth(lambda x, weight: norm(x, weight, **options), [x, weight], grad)
    for ours, true in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, true.float(), atol=1e-4, rtol=1e-4)
    assert torch.equal(grad, before), "backward wrote into grad_output"


def test_rms_norm_takes_any_strides(device, reference) -> None:
    x = torch.randn(64, 5, device=device).t().requires_grad_()
    weight = torch.randn(64, device=device, requires_grad=True)
    grad = torch.ones((), device=device).expand(5, 64)
    ours = results(lambda *a: turbo_ops.rms_norm(*a, 1e-6), [x, weight], grad)
    for got, true in zip(ours, truth(norm, [x, weight], grad), strict=True):
        torch.testing.assert_close(got, true.float(), atol=1e-4, rtol=1e-4)


def test_rms_norm_defaults_are_torch(device, reference) -> None:
    x = torch.randn(5, 64, device=device)
    torch.testing.assert_close(turbo_ops.rms_norm(x), functional.rms_norm(x, (64,)), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"weight has shape \(3,\)"):
        turbo_ops.rms_norm(x, torch.ones(3, device=device))


def test_rms_norm_shows_nan_and_takes_zeros(device, reference) -> None:
    x = torch.randn(3, 64, device=device)
    x[0, 5], x[1] = float("nan"), 0
    y = turbo_ops.rms_norm(x, torch.ones(64, device=device), 1e-6)
    assert y[0].isnan().all()
    assert torch.equal(y[1], torch.zeros_like(y[1]))
    assert y[2].isfinite().all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(1,), (7, 33), (0, 16), (2, 3, 4, 64), (1, 1)], ids=str)
def test_add_rms_norm(shape: tuple, variant: str, compiled: bool, device) -> None:
    options = VARIANTS[variant]
    leaves = [torch.randn(size, device=device, requires_grad=True) for size in (shape, shape, shape[-1:])]
    grads = [torch.randn(shape, device=device) for _ in "yt"]
    before = [grad.clone() for grad in grads]
    function = lambda *leaves: turbo_ops.add_rms_norm(*leaves, 1e-6, **options)  # noqa: E731
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = truth(lambda x, r, weight: (norm(x + r, weight, **options), x + r), leaves, *grads)
    for ours, true in zip(results(function, leaves, *grads), expected, strict=True):
        torch.testing.assert_close(ours, true.float(), atol=1e-4, rtol=1e-4)
    assert all(map(torch.equal, grads, before)), "backward wrote into grad_output"


def test_add_rms_norm_refuses_bad_input(device) -> None:
    x = torch.randn(3, 4, device=device)
    with pytest.raises(
        ValueError, match=r"residual \(3, 1\) torch.float32, x \(3, 4\) torch.float32: give two"
    ):
        turbo_ops.add_rms_norm(x, x[:, :1])
    with pytest.raises(ValueError, match=r"add_rms_norm: weight has shape \(3,\)"):
        turbo_ops.add_rms_norm(x, x, torch.ones(3, device=device))


@pytest.mark.deterministic
def test_rms_norm_repeats_itself(device) -> None:
    leaves = [torch.randn(size, device=device, requires_grad=True) for size in ((300, 576), (576,))]
    grad = torch.randn(300, 576, device=device)
    first, second = (results(turbo_ops.rms_norm, leaves, grad) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert_close(one, other, 0.0, "second run")


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's, as transformers writes it."""
    gate, up = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


ACTIVATIONS = {
    "silu": lambda gate, up: functional.silu(gate) * up,
    "gelu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    "swigluoai": clamped,
}
LAYOUTS = {
    "separate": None,
    "halves": lambda x: x.chunk(2, -1),
    "up first": lambda x: x.chunk(2, -1)[::-1],
    "interleaved": lambda x: (x[..., ::2], x[..., 1::2]),
    "one tensor": lambda x: (x,),
}


@pytest.mark.parametrize("weighted", [False, True], ids=["", "probs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_swiglu_is_autograds(
    layout: str, activation: str, dtype: torch.dtype, weighted: bool, compiled: bool, device, reference
):
    packed = (4 * torch.randn(2, 5, 2 * 33, device=device)).to(dtype).requires_grad_()
    parts = LAYOUTS[layout]
    leaves = [packed] if parts else [half.detach().clone().requires_grad_() for half in packed.chunk(2, -1)]
    leaves += [torch.rand(2, 5, device=device).to(dtype).requires_grad_()] * weighted
    grad = torch.randn(2, 5, 33, device=device).to(dtype)

    def split(leaves: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor | None]:
        given = parts(leaves[0]) if parts else leaves[:2]
        return given, leaves[-1] if weighted else None

    def ours(*leaves: Tensor) -> Tensor:
        given, probs = split(leaves)
        return turbo_ops.swiglu(*given, activation=activation, probs=probs)

    def plain(*leaves: Tensor) -> Tensor:
        given, probs = split(leaves)
        y = ACTIVATIONS[activation](*(given if len(given) == 2 else given[0].chunk(2, -1)))
        return y if probs is None else y * probs[..., None]

    function = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    for one, right in zip(results(function, leaves, grad), truth(plain, leaves, grad), strict=True):
        assert one.dtype == dtype
        close = 1e-4 if dtype == torch.float32 else 2e-2
        assert_close(one, right.to(dtype), close * max(1, right.abs().max().item() / 4), "swiglu")


@pytest.mark.parametrize("fused", [False, True], ids=["separate", "one tensor"])
def test_swiglu_writes_over_what_it_may_consume(fused: bool, device) -> None:
    both, grad = torch.randn(6, 64, device=device), torch.randn(6, 32, device=device)

    def run(consume: bool, **options) -> tuple[list[Tensor], list[Tensor]]:
        packed = both.clone().requires_grad_() * 1
        given = [packed] if fused else [half.contiguous() for half in packed.chunk(2, -1)]
        before = [x.detach().clone() for x in given]
        y = turbo_ops.swiglu(*given, consume=consume)
        found = torch.autograd.grad(y, given, grad, **options)
        if options:
            again = torch.autograd.grad(y, given, grad)
            assert all(map(torch.equal, found, again))
        kept = [bool(torch.equal(x, b)) for x, b in zip(given, before, strict=True)]
        return list(found), kept

    expected, untouched = run(False)
    assert all(untouched)
    consumed, untouched = run(True)
    assert not any(untouched)
    assert all(map(torch.equal, consumed, expected))
    kept, untouched = run(True, retain_graph=True)
    assert all(map(torch.equal, kept, expected)), "the first backward keeps what the second needs"


def test_swiglu_refuses_bad_input(device) -> None:
    x = torch.randn(3, 4, device=device)
    with pytest.raises(ValueError, match=r"gate \(3, 4\) torch.float32, up \(3, 5\) torch.float32: give two"):
        turbo_ops.swiglu(x, torch.randn(3, 5, device=device))
    with pytest.raises(ValueError, match="activation='relu': use one of silu, gelu_tanh, swigluoai"):
        turbo_ops.swiglu(x, x, "relu")
    with pytest.raises(ValueError, match=r"gate \(3, 3\) torch.float32 without up: give \[..., 2 \* D\]"):
        turbo_ops.swiglu(x[:, :3])
    with pytest.raises(ValueError, match=r"probs \(3, 1\) torch.float32: give \(3,\) of fp32"):
        turbo_ops.swiglu(x, x, probs=x[:, :1])
    with pytest.raises(ValueError, match="consume=True with gate and up in the same memory"):
        turbo_ops.swiglu(x, x, consume=True)


SECOND = {
    "rms_norm": lambda x: turbo_ops.rms_norm(x, x[0]),
    "add_rms_norm": lambda x: turbo_ops.add_rms_norm(x, x)[0],
    "swiglu": lambda x: turbo_ops.swiglu(x, x),
    "rope": lambda x: turbo_ops.rope(x[None, None], x[None, None], *torch.ones(2, 1, 4, 8).to(x.device))[0],
}


@pytest.mark.parametrize("name", SECOND)
def test_a_second_derivative_is_refused(name: str, device, reference) -> None:
    """What backward saved would count as constant, and the result be wrong in silence."""
    x = torch.randn(4, 8, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match=f"turbo_ops.{name} is differentiable once"):
        torch.autograd.grad(SECOND[name](x).sum(), x, create_graph=True)
