"""What a run ran on, and the ceilings of that machine measured in the same run."""

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.session import ROOT, Session
from turbo_ops.arch import arch, fp8_dtype

CUBE = {"cuda": 8192, "cpu": 256}  # M = N = K of the largest matmul
COPIED = {"cuda": 2**30, "cpu": 2**24}  # bytes: beyond every cache of a GPU


def facts(device: torch.device) -> dict:
    """GPU, software and commit of this run; None for what the machine does not tell."""
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else f"CPU, {_cpu()}",
        "arch": arch(device),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda if on_gpu else None,
        "hip": torch.version.hip if on_gpu else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def measure_ceilings(session: Session, *, only: str = "") -> None:
    """Fill session.ceilings: copy in GB/s (read + write), bf16 and fp8 in TFLOP/s of torch's own matmuls."""
    for name, run in (("copy", _copy), ("bf16", _bf16), ("fp8", _fp8)):
        if only and name != only:
            continue
        row = {"level": "ceiling", "name": name}
        row = session.measure(row, lambda run=run: run(session, session.device))
        if row["status"] == "ok":
            session.ceilings[name] = row.get("tflops") or row["gbps"]


def _copy(session: Session, device: torch.device) -> dict:
    source = torch.randint(256, (COPIED[device.type],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ms = session.ms(lambda: target.copy_(source))
    return {"case": f"{source.numel() >> 20} MiB", "ms": ms} | session.rate(
        ms, None, bytes_moved=2 * source.numel()
    )


def _bf16(session: Session, device: torch.device) -> dict:
    n = CUBE[device.type]
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    ms = _sustained(session, lambda: torch.mm(a, b.t()))
    return {"case": f"{n}^3 torch.mm", "ms": ms} | session.rate(ms, None, flops=2 * n**3)


def _fp8(session: Session, device: torch.device) -> dict:
    n, dtype = CUBE[device.type], fp8_dtype("e4m3", device)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    one = torch.ones((), device=device)
    ms = _sustained(
        session,
        lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
    )
    return {"case": f"{n}^3 torch._scaled_mm, tensorwise", "ms": ms} | session.rate(ms, None, flops=2 * n**3)


def _sustained(session: Session, run: Callable[[], object]) -> float:
    """Median ms after 0.3 s of work, when a GPU has left its boost clock for what its power allows."""
    end = time.perf_counter() + (0.0 if session.quick else 0.3)
    while time.perf_counter() < end:
        for _ in range(20):
            run()
        session.synchronize()
    return session.ms(run)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(program: str, *arguments: str) -> str | None:
    """What a program of the machine prints; None where it is missing or fails."""
    if shutil.which(program) is None:
        return None
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20, cwd=ROOT)
    return done.stdout.strip() or None if done.returncode == 0 else None


def _commit() -> str:
    """TURBO_COMMIT, for trees copied without .git, or git's answer and a + where files differ from it."""
    named = os.environ.get("TURBO_COMMIT")
    if named:
        return named
    commit = _output("git", "rev-parse", "--short=10", "HEAD") if (ROOT / ".git").exists() else None
    if commit is None:
        return "unknown"
    return f"{commit}+" if _output("git", "status", "--porcelain", "--untracked-files=no") else commit


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
