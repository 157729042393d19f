"""`patch` is right on every architecture or leaves it with a reason, as docs/architectures.md says."""

import pytest
import torch

pytest.importorskip("transformers")

import architectures
from architectures import ARCHITECTURES, build, inputs
from models import patch, reference_on_cpu
from numerics import snr_db
from torch import Tensor, nn

import turbo_nn


@pytest.fixture(autouse=True)
def _reference(device: torch.device):
    with reference_on_cpu(device):
        yield


def outcome(model: nn.Module, given: dict[str, Tensor], training: bool) -> list[Tensor]:
    """Loss, logits where there are any, and every gradient."""
    output = model.train(training)(**given)
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(output.loss, parameters, allow_unused=True)
    logits = [] if training else [output.logits]
    return [output.loss, *logits, *(g for g in grads if g is not None)]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_patched_model_is_equal(name: str, training: bool, device: torch.device) -> None:
    model, given = build(name, device), inputs(name, device)
    expected = outcome(model, given, training)
    patch(model, "bf16")
    actual = outcome(model, given, training)
    for ours, right in zip(actual, expected, strict=True):
        scale = right.abs().max().clamp_min(1e-6)
        assert (ours - right).abs().max() <= 1e-4 * scale
    turbo_nn.unpatch(model)
    for ours, right in zip(outcome(model, given, training), expected, strict=True):
        torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fp8_is_close(name: str, device: torch.device) -> None:
    model, given = build(name, device), inputs(name, device)
    expected = outcome(model, given, True)
    report = patch(model)
    actual = outcome(model, given, True)
    assert actual[0].item() == pytest.approx(expected[0].item(), rel=0.02)
    flat = [torch.cat([g.flatten() for g in grads[1:]]) for grads in (actual, expected)]
    assert snr_db(*flat) > 12
    assert all(verdict.reason for verdict in report.left)


def test_the_page_is_what_patch_does(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("the page is of a CPU, where no layer is too small")
    assert architectures.PAGE.read_text() == architectures.page(), "run python tests/architectures.py"
