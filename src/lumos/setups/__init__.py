"""The description of a training run: what is trained, how, divided how, on which machines."""

from lumos.setups.check import check, checked_setup
from lumos.setups.cluster import Cluster
from lumos.setups.files import SetupReading, read_setup, read_setup_with_notes, write_setup
from lumos.setups.gpus import Gpu, gpu_named, gpu_names
from lumos.setups.model import Model
from lumos.setups.parallel import Parallel
from lumos.setups.presets import Preset, preset_named, preset_names
from lumos.setups.rules import mistakes_in, warnings_in
from lumos.setups.setup import Setup
from lumos.setups.train import Train

__all__ = [
    "Cluster",
    "Gpu",
    "Model",
    "Parallel",
    "Preset",
    "Setup",
    "SetupReading",
    "Train",
    "check",
    "checked_setup",
    "gpu_named",
    "gpu_names",
    "mistakes_in",
    "preset_named",
    "preset_names",
    "read_setup",
    "read_setup_with_notes",
    "warnings_in",
    "write_setup",
]
