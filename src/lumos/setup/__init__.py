"""Setups: model, training, parallelism and cluster of a run.

`sections` has the four sections, `setup` the whole, `constraints` what must hold between them, `gpus`, `presets` and
`frameworks` what is known by name, `setup_files` reads and writes TOML, `importers` reads files of other tools.
"""

from lumos.setup.constraints import check, checked_setup, mistakes_in, warnings_in
from lumos.setup.gpus import Gpu, gpu_named, gpu_names
from lumos.setup.presets import Preset, preset_named, preset_names
from lumos.setup.sections import Cluster, Model, Parallel, Train
from lumos.setup.setup import Setup
from lumos.setup.setup_files import SetupReading, read_setup, read_setup_with_notes, write_setup

__all__ = [
    "Cluster", "Gpu", "Model", "Parallel", "Preset", "Setup", "SetupReading", "Train", "check", "checked_setup",
    "gpu_named", "gpu_names", "mistakes_in", "preset_named", "preset_names", "read_setup", "read_setup_with_notes",
    "warnings_in", "write_setup",
]  # fmt: skip
