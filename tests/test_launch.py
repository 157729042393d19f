"""A kernel is compiled once per kind of addresses, and never run on another kind."""

import pytest
import torch

pytest.importorskip("triton")

from turbo_ops.device import launch

A, B = torch.zeros(64), torch.zeros(64)
PADDED = torch.zeros(65)[1:]  # 4 bytes past an aligned address


class StubKernel:
    """Takes the place of a JIT function: notes what it compiles for, and what runs."""

    arg_names = ("x", "out", "n", "BLOCK", "FLAG")

    def __init__(self) -> None:
        self.compiled, self.ran = [], []

    def __getitem__(self, grid: tuple):
        def compile_and_run(*args: object, **constants: object):
            self.compiled.append((grid, args, constants))
            return len(self.compiled) - 1

        return compile_and_run


@pytest.fixture
def kernel(monkeypatch) -> StubKernel:
    stub = StubKernel()

    def runner(number: int, grid: tuple, rest: tuple, device: int | None):
        return lambda *pointers: stub.ran.append((number, grid, pointers, rest))

    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(launch, "_runner", runner)
    return stub


def test_same_arguments_compile_once(kernel) -> None:
    call = launch.Launch(kernel, (3, 2), (7,), FLAG=True, BLOCK=64, num_warps=4)
    call(A, B)
    call(B, A)
    ((grid, args, constants),) = kernel.compiled
    assert (grid, args[2], constants) == ((3, 2), 7, {"FLAG": True, "BLOCK": 64, "num_warps": 4})
    # addresses; scalars, then constants in the kernel's order
    assert kernel.ran == [(0, (3, 2, 1), (B.data_ptr(), A.data_ptr()), (7, 64, True))]


@pytest.mark.parametrize(
    ("x", "out"),
    [(PADDED, B), (A, PADDED)],
    ids=["alignment", "alignment of the output"],
)
def test_other_arguments_compile_again(kernel, x, out) -> None:
    call = launch.Launch(kernel, (1,), (7,), FLAG=True, BLOCK=64)
    for _ in range(2):
        call(A, B)
        call(x, out)
    assert len(kernel.compiled) == 2
    assert [number for number, *_ in kernel.ran] == [0, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles a kernel for the GPU at hand")
def test_a_launch_on_a_gpu_equals_the_jits(device) -> None:
    """The second call skips the JIT; a hook that a profiler adds sees that launch too."""
    import triton

    from turbo_ops.quantize import quantize_both

    x = torch.randn(128, 256, device=device)
    args = x, torch.float8_e4m3fn, 1, 128, torch.float32
    first, seen = quantize_both(*args), []
    hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    second = quantize_both(*args)
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        third = quantize_both(*args)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == ["block_cast_kernel"]
    for outputs in zip(first, second, third, strict=True):
        expected, *others = (output.float() for output in outputs)
        assert all(torch.equal(expected, other) for other in others)
