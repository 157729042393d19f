"""A kernel is compiled once per kind of arguments, and never run on another kind."""

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
            number = len(self.compiled)
            self.compiled.append((grid, args, constants))
            return {(*grid, 1, 1)[:3]: lambda *args: self.ran.append((number, args))}

        return compile_and_run


@pytest.fixture
def kernel(monkeypatch) -> StubKernel:
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    return StubKernel()


def test_same_arguments_compile_once(kernel) -> None:
    call = launch.Launch(kernel, (3, 2), (7,), FLAG=True, BLOCK=64, num_warps=4)
    call(A, B)
    call(B, A)
    ((grid, args, constants),) = kernel.compiled
    assert (grid, args[2], constants) == ((3, 2), 7, {"FLAG": True, "BLOCK": 64, "num_warps": 4})
    ((number, args),) = kernel.ran
    assert number == 0
    assert args[0] is B
    assert args[1] is A
    assert args[2:] == (7, 64, True), "scalars, then constants in the kernel's order"


@pytest.mark.parametrize(
    ("x", "out"),
    [(A.bfloat16(), B), (A, B.half()), (None, B), (PADDED, B), (A, PADDED)],
    ids=["dtype", "dtype of the output", "absent", "alignment", "alignment of the output"],
)
def test_other_arguments_compile_again(kernel, x, out) -> None:
    call = launch.Launch(kernel, (1,), (7,), FLAG=True, BLOCK=64)
    for _ in range(2):
        call(A, B)
        call(x, out)
    assert len(kernel.compiled) == 2
    assert [number for number, _ in kernel.ran] == [0, 1]
