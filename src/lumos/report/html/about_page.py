"""About page: the report of `lumos about`."""

from __future__ import annotations

from lumos.analysis.about import About, AboutMachine
from lumos.report import about_tables as tables
from lumos.report.html.page import Page, Section

_COSTS = "Each family of operators was fitted on samples; the error is the mean on shapes that were held out."


def about_page(found: About) -> Page:
    sections = [
        Section("Costs and their errors", _COSTS, tables=[tables.costs_table(found), tables.families_table(found)]),
        Section("Intervals", tables=[tables.intervals_table(found)]),
        Section("GPUs", tables=[tables.gpus_table(found)]),
        Section("Models", tables=[tables.models_table(found)]),
        Section("Frameworks", tables=[tables.frameworks_table(found)]),
        Section("Provenance", tables=[tables.provenance_table(found)]),
    ]
    return Page(f"Lumos {found.version}: what it knows", "", tables.about_cards(found), sections)


def machine_page(found: AboutMachine) -> Page:
    sections = [
        Section("Operators", tables=[tables.machine_families_table(found)]),
        Section("The rest of the machine", tables=[tables.machine_parts_table(found)]),
        Section("Provenance", tables=[tables.machine_samples_table(found)]),
    ]
    return Page(f"{found.gpu}: what was measured", found.file, tables.machine_cards(found), sections)
