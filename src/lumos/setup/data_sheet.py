"""Data sheets: a GPU that its user describes, in TOML. Read and checked here; lumos.setup.gpus makes a Gpu of it.

    like = "h100"      # a known GPU, for all that is not given
    power_w = 500      # the power limit of the board
    hbm_tb_s = 2.0

    [peak_tflops]      # dense
    bf16 = 800

Without `like`, everything under "what a chip is" has to be given.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lumos.errors import InputError
from lumos.files import read_file, stamp_of
from lumos.setup.messages import mistakes_of, one_of, shown
from lumos.setup.toml_text import toml_table

ADVICE = "give a data sheet in TOML, as in docs/gpus.md"
_MOST_BYTES = 1 << 20
Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4", "fp4"]
Rate = Annotated[float, Field(ge=1e-3, le=1e6)]
Power = Annotated[float, Field(ge=1, le=1e5)]
Family = Literal[
    "volta", "turing", "ampere", "ada", "hopper", "blackwell", "rtx-blackwell", "cdna2", "cdna3", "cdna4", "tpu",
    "trainium", "gaudi", "other",
]  # fmt: skip


class DataSheet(BaseModel):
    """The keys of a data sheet, in the units that vendors print."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    like: Annotated[str, Field(max_length=100)] = ""
    name: Annotated[str, Field(max_length=100)] = ""  # for people; reports show the file's name
    # What a chip is.
    memory_gib: Annotated[float, Field(ge=0.1, le=1e5)] | None = None  # as torch reports it
    hbm_tb_s: Annotated[float, Field(ge=1e-3, le=1e4)] | None = None
    peak_tflops: dict[Precision, Rate] = {}  # dense; with `like`, those that differ
    power_w: Power | None = None  # the limit of the board
    sms: Annotated[int, Field(ge=4, le=1 << 16)] | None = None  # multiprocessors, or compute units
    l2_mb: Annotated[float, Field(ge=1e-3, le=1e6)] | None = None  # the last cache before memory
    clock_ghz: Annotated[float, Field(ge=0.01, le=100)] | None = None  # the highest
    # Its family, and the machine around it.
    family: Family | None = None
    idle_w: Power | None = None
    nvlink_gb_s: Annotated[float, Field(ge=0, le=1e6)] | None = None  # one direction, or Infinity Fabric; 0: none
    nvlink_domain: Annotated[int, Field(ge=1, le=1 << 20)] | None = None  # GPUs that it joins
    pcie_gb_s: Rate | None = None  # one direction
    host_gb_s: Annotated[float, Field(ge=0, le=1e6)] | None = None  # to the host's memory, where that is not by PCIe
    inter_gb_s: Rate | None = None  # of one GPU's adapter, one direction: Gbit/s / 8
    gpus_per_node: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    price: Annotated[float, Field(ge=1e-6, le=1e9)] | None = None  # of an hour, in any currency
    source: Annotated[str, Field(max_length=10_000)] = ""

    @property
    def peaks(self) -> dict[str, float]:
        """Dense TFLOP/s by precision."""
        return {str(precision): rate for precision, rate in self.peak_tflops.items()}

    @property
    def facts(self) -> dict[str, Any]:
        """What it gives, under the names that lumos.setup.gpus.Gpu has for it."""
        other = {"like", "name", "hbm_tb_s", "power_w", "peak_tflops"}
        given = {key: value for key, value in self if key not in other and value not in (None, "")}
        if self.hbm_tb_s is not None:
            given["hbm_gb_s"] = self.hbm_tb_s * 1e3
        if self.power_w is not None:
            given["tdp_w"] = self.power_w
        return given


NEEDED = ("memory_gib", "hbm_tb_s", "peak_tflops", "power_w", "sms", "l2_mb", "clock_ghz")


def read_data_sheet(path: Path) -> DataSheet:
    """A checked data sheet, read again where the file has changed; InputError with every mistake in it, one a line."""
    return _read(path, stamp_of(path))


@lru_cache(maxsize=64)
def _read(path: Path, stamp: int) -> DataSheet:
    try:
        values = toml_table(read_file(path, _MOST_BYTES, ADVICE).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and TOMLDecodeError are ValueErrors
        why = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"not TOML: {error}"
        raise InputError(f"{path}: {why}; {ADVICE}") from None
    return _checked(values, str(path))


def _checked(values: Mapping[str, Any], place: str) -> DataSheet:
    if not isinstance(values.get("peak_tflops", {}), dict):
        rates = "bf16 = 989 and so on"
        raise InputError(f"{place}: peak_tflops = {shown(values['peak_tflops'])} is no table: write {rates} below it")
    unknown = sorted(set(values.get("peak_tflops", {})) - set(get_args(Precision)))
    if unknown:
        raise InputError(f"{place}: peak_tflops.{unknown[0][:60]} is not known: use {one_of(get_args(Precision))}")
    try:
        sheet = DataSheet.model_validate(values)
    except ValidationError as error:
        wrong = mistakes_of(error, place, list(DataSheet.model_fields)).values()
        raise InputError("\n".join(text.replace(f"{place}.", f"{place}: ", 1) for text in wrong)) from None
    missing = [key for key in NEEDED if not getattr(sheet, key)]
    if missing and not sheet.like:
        raise InputError(f'{place}: {missing[0]} is missing: give it, or name a known GPU with like = "h100"')
    return sheet
