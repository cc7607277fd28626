"""Fits the constants of the network model to published collectives, and shows its error on sources held apart.

    python calibration/fit_collectives.py [--fit]

Without --fit: the error of the constants in data/network.json and data/fabrics.toml. With it: the constants that rows
marked `fit` in published_collectives.csv ask for, one after the other until none gets better (a minute). They are
rounded by hand into the data files. Rows marked `check` were never fitted on. Latencies that NCCL publishes
(src/graph/tuning.cc) are not fitted. The error is the mean of |ln(predicted / measured)|, every table counting once.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from lumos.costs.energy import in_step_factors
from lumos.costs.network import Fabric, Habits, Network, Tier, habits, network_of
from lumos.data_files import read_table
from lumos.program.operators import Collective, Group
from lumos.setup.gpus import Gpu, gpu_named

TABLE = Path(__file__).with_name("published_collectives.csv")
SMALLEST = 1 << 18  # bytes: training has few smaller messages
STEPS = (0.8, 0.93, 0.98, 1.02, 1.07, 1.25)
MOST_SHARE = 0.95  # of a link: headers and flow control take the rest
FITTED_HABITS = (
    "inside_share", "gather_share", "exchange_share", "nvls_us", "nvls_member_us", "peer_us", "peer_far_us",
    "peer_gb_s", "fill_inside", "fill_between", "fill_exchange",
)  # fmt: skip
FITTED_FABRICS = ("ring_share", "tree_share", "send_share", "relay_us", "crowding", "hop_us", "most_gb_s")
Constants = dict[tuple[str, str], float]  # of ("habits" or a fabric, name)


class Row(NamedTuple):
    """One measured collective."""

    source: str
    is_fitted: bool
    fabric: str
    gpu: Gpu
    collective: Collective
    us: float

    @property
    def table(self) -> tuple[str, str, Group]:
        return self.source, self.collective.kind, self.collective.group


@dataclass(frozen=True)
class Model:
    """The network of a row under other constants."""

    constants: Mapping[tuple[str, str], float]

    def error(self, row: Row) -> float:
        return math.log(self.network(row).us(row.collective) / row.us)

    def network(self, row: Row) -> Network:
        usual = network_of(row.gpu, row.fabric, in_step_factors(row.gpu))
        of_habits = {name: value for (where, name), value in self.constants.items() if where == "habits"}
        of_fabric = {name: value for (where, name), value in self.constants.items() if where == row.fabric}
        hop = of_fabric.pop("hop_us", usual.tiers[-1].hop_us)
        tiers = (*usual.tiers[:-1], Tier(usual.tiers[-1].bandwidth, hop))
        fabric: Fabric = replace(usual.fabric, **of_fabric)  # type: ignore[arg-type]
        known: Habits = replace(usual.habits, **of_habits)  # type: ignore[arg-type]
        return replace(usual, tiers=tiers, fabric=fabric, habits=known, penalty=1.0)


def rows() -> Iterator[Row]:
    """The table; "-" is a GPU that is alone in its node, where its links do not matter."""
    with TABLE.open(newline="") as file:
        for line in csv.DictReader(file):
            gpu = gpu_named("gh200" if line["gpu"] == "-" else line["gpu"])
            ranks, inside = int(line["ranks"]), int(line["inside"])
            domain = 4 if line["source"] == "perlmutter" else gpu.nvlink_domain
            node = min(gpu.gpus_per_node, domain)
            gpu = replace(gpu, inter_gb_s=float(line["inter_gb_s"]), nvlink_domain=domain, gpus_per_node=node)
            collective = Collective(line["kind"], float(line["bytes"]), Group(ranks, inside))
            yield Row(line["source"], line["use"] == "fit", line["fabric"], gpu, collective, float(line["us"]))


def mean_error(model: Model, chosen: list[Row]) -> float:
    """Every table counts once, however many sizes it has."""
    tables = defaultdict(list)
    for row in chosen:
        tables[row.table].append(abs(model.error(row)))
    return sum(sum(errors) / len(errors) for errors in tables.values()) / len(tables)


def fitted(chosen: list[Row]) -> Constants:
    """Constants that no step makes better."""
    fabrics = read_table("fabrics.toml")
    seen = sorted({row.fabric for row in chosen})
    constants: Constants = {("habits", name): getattr(habits(), name) for name in FITTED_HABITS}
    constants |= {(f, name): fabrics[f][name] for f in seen for name in FITTED_FABRICS if fabrics[f].get(name)}
    best, before = mean_error(Model(constants), chosen), math.inf
    while best < before - 1e-4:
        before = best
        for key in constants:
            for step in STEPS:
                value = constants[key] * step
                tried = constants | {key: min(value, MOST_SHARE) if key[1].endswith("_share") else value}
                if (error := mean_error(Model(tried), chosen)) < best:
                    best, constants = error, tried
        print(f"mean error {best:.4f}", flush=True)
    return constants


def show(model: Model, chosen: list[Row]) -> None:
    """Errors by table."""
    print("| source | used to | fabric | kind | ranks x in a domain | sizes | mean error % | bias % |")
    print("|---|---|---|---|---|---|---|---|")
    tables = defaultdict(list)
    for row in chosen:
        tables[row.table].append((row, model.error(row)))
    for (source, kind, group), found in sorted(tables.items(), key=lambda item: (not item[1][0][0].is_fitted, item[0])):
        errors = [error for _, error in found]
        mean, bias = (100 * math.expm1(sum(v) / len(v)) for v in ([abs(e) for e in errors], errors))
        use = "fit" if found[0][0].is_fitted else "check"
        shape = f"{group.size} x {group.inside}"
        cells = (source, use, found[0][0].fabric, kind, shape, len(errors), f"{mean:.0f}", f"{bias:+.0f}")
        print("| " + " | ".join(map(str, cells)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true")
    chosen = [row for row in rows() if row.collective.bytes >= SMALLEST]
    fit = [row for row in chosen if row.is_fitted]
    check = [row for row in chosen if not row.is_fitted]
    constants = fitted(fit) if parser.parse_args().fit else {}
    for (where, name), value in constants.items():
        print(f"{where}.{name} = {value:.4g}")
    model = Model(constants)
    show(model, chosen)
    print(f"\nmean over tables: fit {mean_error(model, fit):.3f}, check {mean_error(model, check):.3f}")


if __name__ == "__main__":
    main()
