"""The rows of a run as tables: aligned text for a terminal, Markdown for docs/performance.md."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

# What is promised. Host cost: of a step of 32x256x256, times nn.Linear's in the same run.
MOST_HOST_COST = 2.5
MOST_DISPATCH_US = 10.0
# Share of the FP8 ceiling that a linear step of 8192 tokens reaches, the better of the recipes
SHARES = {
    ("fp8_tensorwise", "fp8_delayed"): {"qkv": 0.89, "o": 0.88, "gate_up": 0.91, "down": 0.89},
    ("fp8_blockwise",): {"qkv": 0.76, "o": 0.75, "gate_up": 0.78, "down": 0.78},
}
KEPT_GAIN = 0.02  # on top, with the weight cast once for 4 micro-batches
CAST_SHARES = {"quantize_both_delayed": ("", 0.85), "quantize_both": ("1", 0.80)}  # op -> cases that begin so
MOST_DEVICE_MS = {  # level, case, variant: in a CUDA graph
    ("rms_norm", "8192x4096 step", "turbo_nn.RMSNorm"): 0.088,
    ("rope", "2x4096x(32+8)x128 step", "turbo_ops.rope"): 0.11,
}
GLUE = ("swiglu", "rope", "loss")
MOST_GLUE = {  # level, case's beginning, variant -> ms, GiB
    ("swiglu", "8192x14336", "turbo_ops.swiglu"): (0.45, None),
    ("loss", "8192x4096x128256", "linear_cross_entropy bf16"): (42.0, 2.5),
    ("loss", "8192x4096x128256", "linear_cross_entropy fp8_tensorwise"): (28.0, None),
}
MOST_MODEL_TIME = {"any head": 0.74, "bf16 head": 0.68, "FP8 head": 0.60}  # of Hugging Face's eager step
MOST_MODEL_GIB = 9.5
MIXTURES = ("grouped", "moe")
LEAST_GROUPED = {  # TFLOP/s of a step in bf16, and by the better of the FP8 recipes
    "mixtral": (660, 1000),
    "qwen3": (560, 720),
    "deepseek_v3": (640, 950),
}
MOST_MOE_MS, MOST_MOE_GIB = {"bf16": 4.0, "fp8": 3.2}, 3.5
MOST_MIXTURE_TIME, MOST_MIXTURE_GIB = 0.55, 15.0  # of transformers' grouped_mm
SNR_CAP = 200.0  # dB; equal bits have infinite SNR, which JSON cannot hold


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def tables(result: dict) -> list[Table]:
    """Every table that the rows of a result fill, in the order to read them."""
    rows = result["rows"]
    makers = [model, linear, mixtures, glue, rms_norm, host, missing, *op_tables(rows)]
    if result["machine"]["arch"] != "cpu":  # the targets are about kernels, a CPU runs references
        makers.insert(0, targets)
    made = [make(rows) for make in makers]
    return [table for table in made if table.rows]


def targets(rows: list[dict]) -> Table:
    found = [*_linear_targets(rows), *_model_targets(rows), *_mixture_targets(rows)]
    for row in ok(rows, "host"):
        if row["variant"].startswith("fp8") and row.get("cost"):
            found.append(_at_most(f"host cost of {row['variant']}", row["cost"], MOST_HOST_COST, "x"))
    for row in ok(rows, "dispatch"):
        found.append(_at_most("dispatch of an op", row["us"], MOST_DISPATCH_US, " us"))
    for row in ok(rows, "op"):
        begins, least = CAST_SHARES.get(row["name"], ("", 0.0))
        if least and row["variant"] == "triton" and row["case"].startswith(begins) and row.get("share"):
            found.append(_at_least(f"{row['name']} {row['case']}, of copy", row["share"], least))
    for row in (row for level in ("rms_norm", *GLUE) for row in ok(rows, level)):
        most = MOST_DEVICE_MS.get((row["level"], row["case"], row["variant"]))
        if most and row.get("device_ms"):
            found.append(_at_most(f"{row['variant']} {row['case']}, device", row["device_ms"], most, " ms"))
        case = row["case"].removesuffix(" step")
        most_ms, most_gib = MOST_GLUE.get((row["level"], case, row["variant"]), (None, None))
        if most_ms:
            found.append(_at_most(f"{row['variant']} {case}", row["ms"], most_ms, " ms"))
        if most_gib:
            found.append(_at_most(f"{row['variant']} {case}, peak", row["peak_gib"], most_gib, " GiB"))
    return Table("Targets", ("what", "target", "measured", ""), found)


def _linear_targets(rows: list[dict]) -> list[tuple[str, ...]]:
    found = []
    shares = {(row["case"].split()[0], row["variant"]): row["share"] for row in ok(rows, "linear")}
    for recipes, wanted in SHARES.items():
        for suffix, gain in (("", 0.0), (", weight cast once for 4", KEPT_GAIN)):
            for layer, least in wanted.items():
                reached = [shares.get((layer, f"{recipe}{suffix}")) for recipe in recipes]
                best = max(filter(None, reached), default=None)
                if best is not None:
                    what = f"{layer} by {' or '.join(recipes)}{suffix}, of FP8"
                    found.append(_at_least(what, best, least + gain))
    return found


def _model_targets(rows: list[dict]) -> list[tuple[str, ...]]:
    eager, *patched = [row for row in ok(rows, "model") if row["case"].startswith("Llama")] or [None]
    if not patched:
        return []
    found = []
    for head, most in MOST_MODEL_TIME.items():
        rows = [row for row in patched if head == "any head" or _head(row) == head]
        if rows:
            best = min(rows, key=lambda row: row["ms"])
            found.append(_at_most(f"model, {head}, of HF eager's time", best["ms"] / eager["ms"], most))
    if patched[0].get("peak_gib"):
        least = min(row["peak_gib"] for row in patched)
        found.append(_at_most("model, peak memory, of HF eager's", least / eager["peak_gib"], 1.0))
        found.append(_at_most("model, peak memory", least, MOST_MODEL_GIB, " GiB"))
    return found


def _mixture_targets(rows: list[dict]) -> list[tuple[str, ...]]:
    found = []
    for row in ok(rows, "grouped"):
        least = LEAST_GROUPED.get(row["case"].split()[0])
        if least and (row["variant"] == "bf16" or row["variant"] in ("fp8_rowwise", "fp8_blockwise")):
            wanted = least[row["variant"] != "bf16"]
            verdict = "met" if row["tflops"] >= wanted else "MISSED"
            what = f"grouped {row['case']} {row['variant']}"
            found.append((what, f">= {wanted} TFLOP/s", f"{number(row['tflops'])} TFLOP/s", verdict))
    for row in ok(rows, "moe")[1:]:
        what = f"block {row['case']} {row['variant']}"
        found.append(_at_most(what, row["ms"], MOST_MOE_MS[row["variant"].partition("_")[0]], " ms"))
        if row.get("peak_gib"):
            found.append(_at_most(f"{what}, peak", row["peak_gib"], MOST_MOE_GIB, " GiB"))
    theirs, *patched = [row for row in ok(rows, "model") if row["case"].startswith("Qwen3Moe")] or [None]
    if patched and patched[0].get("peak_gib"):
        best, least = min(row["ms"] for row in patched), min(row["peak_gib"] for row in patched)
        what = "mixture model, of HF grouped_mm's time"
        found.append(_at_most(what, best / theirs["ms"], MOST_MIXTURE_TIME))
        found.append(_at_most("mixture model, peak memory", least, MOST_MIXTURE_GIB, " GiB"))
    return found


def _head(row: dict) -> str:
    return "bf16 head" if row["variant"].endswith("bf16 head") else "FP8 head"


def _at_most(what: str, value: float, most: float, unit: str = "") -> tuple[str, ...]:
    return what, f"<= {number(most)}{unit}", f"{number(value)}{unit}", "met" if value <= most else "MISSED"


def _at_least(what: str, value: float, least: float) -> tuple[str, ...]:
    return what, f">= {percent(least)}", percent(value, 1), "met" if value >= least else "MISSED"


def linear(rows: list[dict]) -> Table:
    header = ("layer", "by", "ms", "TFLOP/s", "of FP8", "speed", "SNR y dx dw", "GiB", "backends")
    found = [
        (
            *(row["case"], row["variant"], number(row["ms"]), number(row["tflops"]), percent(row["share"])),
            *(
                number(row.get("speedup"), "x"),
                snrs(row),
                number(row.get("peak_gib")),
                row.get("backend") or "",
            ),
        )
        for row in ok(rows, "linear")
    ]
    return Table("Linear: forward + backward", header, once(found))


def rms_norm(rows: list[dict]) -> Table:
    header = ("case", "by", "ms", "device ms", "GB/s", "of copy", "speed", "SNR y dx dw", "backend")
    found = [
        (
            *(row["case"], row["variant"], number(row["ms"]), number(row.get("device_ms"))),
            *(number(row["gbps"]), percent(row["share"])),
            *(number(row.get("speedup"), "x"), snrs(row), row.get("backend") or ""),
        )
        for row in ok(rows, "rms_norm")
    ]
    return Table("RMSNorm", header, once(found))


def glue(rows: list[dict]) -> Table:
    return _steps("Between linear layers: forward + backward", GLUE, rows)


def mixtures(rows: list[dict]) -> Table:
    return _steps("Mixtures of experts: forward + backward", MIXTURES, rows)


def _steps(title: str, levels: tuple[str, ...], rows: list[dict]) -> Table:
    header = (
        *("case", "by", "ms", "device ms", "GB/s or TFLOP/s", "of ceiling", "speed", "peak GiB"),
        "SNR of results and gradients",
    )
    found = [
        (
            *(f"{row['level']} {row['case']}", row["variant"], number(row["ms"])),
            *(number(row.get("device_ms")), number(row.get("gbps") or row.get("tflops"))),
            percent(row["share"]),
            *(number(row.get("speedup"), "x"), number(row.get("peak_gib")), snrs(row)),
        )
        for row in (row for level in levels for row in ok(rows, level))
    ]
    return Table(title, header, once(found))


def host(rows: list[dict]) -> Table:
    found = [
        (row["case"], row["variant"], number(row["us"]), number(row.get("cost"), "x"))
        for row in (*ok(rows, "host"), *ok(rows, "dispatch"))
    ]
    return Table("Host cost: wall time of an eager call", ("call", "by", "us", "cost"), once(found))


def model(rows: list[dict]) -> Table:
    header = (
        "model",
        "by",
        "step ms",
        "speed",
        "tokens/s",
        "peak GiB",
        "patched/left",
        "loss gap",
        "SNR of logits",
    )
    found = [
        (
            *(row["case"], row["variant"], number(row["ms"]), number(row.get("speedup"), "x")),
            *(number(row["tokens_per_s"]), number(row.get("peak_gib"))),
            f"{row['patched']}/{row['left']}" if "patched" in row else "",
            *(percent(abs(row["loss_gap"]), 2), decibel(row["snr_y_db"])),
        )
        for row in ok(rows, "model")
    ]
    return Table("Model: forward + backward", header, once(found))


def op_tables(rows: list[dict]) -> list[Callable[[list[dict]], Table]]:
    names = dict.fromkeys(row["name"] for row in rows if row["level"] == "op")
    return [lambda rows, name=name: _op(rows, name) for name in names]


def _op(rows: list[dict], name: str) -> Table:
    """A case a line, its backends side by side: ms, rate (share of the ceiling), times torch."""
    mine = [row for row in rows if row["level"] == "op" and row["name"] == name]
    backends = list(dict.fromkeys(row["variant"] for row in mine))
    cells: dict[str, dict[str, str]] = {}
    for row in mine:
        cells.setdefault(row["case"], {})[row["variant"]] = _cell(row)
    baseline = next((row["baseline"] for row in mine if row.get("baseline")), "torch")
    unit = "TFLOP/s" if any(row.get("tflops") for row in mine) else "GB/s"
    found = [(case, *(by.get(backend, "") for backend in backends)) for case, by in cells.items()]
    title = f"{name}: ms, {unit} (of ceiling), times {baseline}"
    return Table(title, ("case", *backends), found)


def _cell(row: dict) -> str:
    if row["status"] != "ok":
        return row["status"]
    share = f" ({percent(row['share'])})" if row.get("share") else ""
    rate = number(row.get("tflops") or row.get("gbps"))
    return f"{number(row['ms'])}, {rate}{share}, {number(row.get('speedup'), 'x')}"


def missing(rows: list[dict]) -> Table:
    """Each reason once: what refused, was wrong or failed, and in how many cases."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            reason = row["reason"].partition(" refuses: ")[2] or row["reason"]
            key = f"{row['name']} {row['variant']}".strip(), row["status"], reason
            groups.setdefault(key, []).append(row["case"])
    found = [
        (what, status, cases[0] + (f" and {len(cases) - 1} more" if len(cases) > 1 else ""), reason)
        for (what, status, reason), cases in groups.items()
    ]
    return Table("Without a number", ("what", "", "case", "reason"), found)


def machine_line(machine: dict) -> str:
    parts = [f"{machine['gpu']} ({machine['arch']})", f"torch {machine['torch']}"]
    parts += [f"{name} {machine[name]}" for name in ("triton", "cuda", "hip", "driver") if machine.get(name)]
    return ", ".join([*parts, f"commit {machine['commit']}", machine["date"]])


def ceilings_line(ceilings: dict) -> str:
    units = {"copy": "GB/s", "bf16": "TFLOP/s", "fp8": "TFLOP/s"}
    return ", ".join(f"{name} {number(ceilings.get(name))} {unit}" for name, unit in units.items())


def text(result: dict) -> str:
    """Machine, ceilings and tables in columns; what matters most comes last, where a terminal ends."""
    blocks = [aligned(table) for table in reversed(tables(result))]
    lines = [machine_line(result["machine"]), f"ceilings: {ceilings_line(result['ceilings'])}"]
    return "\n\n".join([*blocks, "\n".join(lines)])


def aligned(table: Table) -> str:
    lines = [table.header, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.header))]
    columns = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([f"== {table.title}", *columns])


def markdown(table: Table) -> str:
    lines = [table.header, ("---",) * len(table.header), *table.rows]
    escaped = ("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return "\n".join([f"### {table.title}", "", *escaped])


def ok(rows: Iterable[dict], level: str) -> list[dict]:
    return [row for row in rows if row["level"] == level and row["status"] == "ok"]


def once(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The first cell is left empty where it repeats the line above."""
    firsts = [None, *(row[0] for row in rows)]
    return [("" if row[0] == above else row[0], *row[1:]) for row, above in zip(rows, firsts, strict=False)]


def number(value: float | None, unit: str = "") -> str:
    """Three figures that mean something; nothing for None."""
    if value is None:
        return ""
    if abs(value) < 0.1:
        return f"{value:.3g}{unit}"
    decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{decimals}f}{unit}"


def percent(share: float | None, decimals: int = 0) -> str:
    return "" if share is None else f"{share * 100:.{decimals}f}%"


def snrs(row: dict) -> str:
    return " ".join(decibel(row.get(f"snr_{name}_db")) for name in ("y", "dx", "dw"))


def decibel(snr: float | None) -> str:
    return "" if snr is None else "same" if snr >= SNR_CAP else f"{snr:.0f}"
