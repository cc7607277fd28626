"""What this machine is: the first line of a file of samples, and the counters of its GPU's board."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

Facts = dict[str, Any]

_CLOCK_SM = 1  # of NVML: the clock of the multiprocessors


def about_machine(device: str) -> Facts:
    """The first line of a file of samples: the device, the software, and what both report of themselves."""
    common = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    host = {"host": _host_name(), "gpus_per_node": 1, "nodes": 1}
    if device == "cpu":
        return {"gpu": "cpu"} | common | {"device": _cpu_facts()} | host
    board = Board.of_this_gpu()
    driver = {"driver": board.driver()} if board is not None else {}
    name = torch.cuda.get_device_name()
    cuda = torch.version.cuda or f"hip {getattr(torch.version, 'hip', '')}"
    return {"gpu": name} | common | {"cuda": cuda} | driver | {"device": _gpu_facts(board)} | host


def _gpu_facts(board: Board | None) -> Facts:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    facts: Facts = {
        "memory_gib": round(properties.total_memory / 2**30, 2),
        "sms": properties.multi_processor_count,
        "l2_mb": round(getattr(properties, "L2_cache_size", 0) / 1e6, 1),
    }
    if board is not None:
        facts |= {"clock_ghz": round(board.top_clock_mhz() / 1e3, 3), "power_limit_w": board.limit_w()}
    return {name: value for name, value in facts.items() if value}


def _cpu_facts() -> Facts:
    """A CPU as a device: its threads in place of multiprocessors, its last-level cache in place of the second."""
    facts: Facts = {"sms": torch.get_num_threads(), "l2_mb": round(_last_level_cache_mb(), 1)}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory_gib"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 2)
    clock = _cpuinfo("cpu MHz")
    if clock:
        facts["clock_ghz"] = round(float(clock) / 1e3, 3)
    return {name: value for name, value in facts.items() if value}


def _last_level_cache_mb() -> float:
    """Of one CPU socket, by the kernel; 0 where it does not say."""
    found = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            found.append(int(text[:-1]) * 1024 / 1e6)
    return max(found, default=0.0)


def _host_name() -> str:
    """The model of the CPU."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


class Board:
    """The counters of one GPU's board, read through the library of NVIDIA's driver."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    @classmethod
    def of_this_gpu(cls) -> Board | None:
        """The board that torch uses, found by its identifier; None without the driver's library."""
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return None
        if library.nvmlInit_v2():
            return None
        index = torch.cuda.current_device()
        uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
        handle = ctypes.c_void_p()
        failed = library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}".encode(), ctypes.byref(handle))
        if failed and library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            return None
        return cls(library, handle)

    def joules(self) -> float | None:
        """What the board has used since the driver was loaded; None where it does not count."""
        value = ctypes.c_ulonglong()
        failed = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(value))
        return None if failed else value.value / 1e3

    def watts(self) -> float | None:
        """What the board draws, averaged by the driver over some of the last milliseconds."""
        return self._number("nvmlDeviceGetPowerUsage", 1e-3)

    def limit_w(self) -> float | None:
        return self._number("nvmlDeviceGetEnforcedPowerLimit", 1e-3)

    def clock_mhz(self) -> float:
        return self._number("nvmlDeviceGetClockInfo", 1.0, _CLOCK_SM) or 0.0

    def top_clock_mhz(self) -> float:
        return self._number("nvmlDeviceGetMaxClockInfo", 1.0, _CLOCK_SM) or 0.0

    def driver(self) -> str:
        text = ctypes.create_string_buffer(96)
        self._library.nvmlSystemGetDriverVersion(text, 96)
        return text.value.decode(errors="replace")

    def _number(self, function: str, unit: float, *arguments: int) -> float | None:
        value = ctypes.c_uint()
        failed = getattr(self._library, function)(self._handle, *arguments, ctypes.byref(value))
        return None if failed else value.value * unit
