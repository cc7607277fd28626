"""Turns the NCCL samples of arXiv 2509.22832 (MIT licence) into the tables that benchmarks/ten_runs.py uses.

    python calibration/fit_networks.py OPERATORS

Writes benchmarks/networks/perlmutter.json and vista.json, and prints for every configuration its ring bandwidth,
the error of a table fitted on every other sample on the samples left out, and that of the ring formula, which never saw
the configuration's own table.

What `shape` means was found by looking: elements of fp16, of the tensor that is reduced or sent, and of the part that
one rank contributes for the all-gather (of two ranks it then takes as long as the all-reduce of the same shape, and of
n ranks n - 1 times as long). Files without nodes and GPUs in their names are the others once more, put together.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lumos.program.operators import Collective, Group

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from sampled_network import FOLDER, Rings, SampledNetwork, Table, decode

SITES = {"Perlmutter": 4, "Vista": 1}  # GPUs a node
KINDS = {
    "allreduce": "all_reduce", "allreduce_large": "all_reduce", "allgather_large": "all_gather", "p2p": "p2p",
}  # fmt: skip
KNOTS_PER_OCTAVE = 4
SANE = (0.6, 1.4)  # of the ring bandwidth that the all-reduce of the same ranks reaches
NO_LINKS = 1e5  # one GPU a node: never asked for

Key = tuple[str, int, int]
Floats = NDArray[np.float64]
Samples = tuple[Floats, Floats]  # bytes of the whole tensor, microseconds


def read(folder: Path) -> dict[Key, Samples]:
    """The samples of one site by configuration, in order of size."""
    rows: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    for path in sorted(folder.glob("*.csv")):
        named = re.fullmatch(r"(\w+?)_fp16_(\d+)_(\d+)", path.stem)
        if not named:
            continue
        kind, nodes, inside = KINDS[named[1]], int(named[2]), int(named[3])
        ranks = nodes * inside if kind == "all_gather" else 1
        with path.open() as file:
            for row in csv.DictReader(file):
                rows[kind, nodes, inside].append((2.0 * ranks * float(row["shape"]), float(row["dur(us)"])))
    return {key: (np.array(sorted(values))[:, 0], np.array(sorted(values))[:, 1]) for key, values in rows.items()}


def tabulate(size: Floats, us: Floats) -> Table:
    """Medians of the time for one byte, over a quarter of an octave each, made to rise."""
    bins = np.floor(np.log2(size / size[0]) * KNOTS_PER_OCTAVE).astype(int)
    centres, medians = [], []
    for index in np.unique(bins):
        some = bins == index
        centre = float(np.exp(np.log(size[some]).mean()))
        centres.append(round(centre))
        medians.append(round(float(np.median(us[some] / size[some])) * centre, 1))
    return Table(tuple(float(c) for c in centres), tuple(float(m) for m in _rising(medians)))


def _rising(values: list[float]) -> list[float]:
    """The nearest series that never falls: neighbours that do are put together."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [round(float(np.mean(pool)), 1) for pool in pools for _ in pool]


def bandwidths(key: Key, size: Floats, us: Floats) -> Floats:
    """Bytes per microsecond through every link of a ring, as nccl-tests count them."""
    kind, nodes, inside = key
    ranks = nodes * inside
    share = {"all_reduce": 2 * (ranks - 1) / ranks, "all_gather": (ranks - 1) / ranks, "p2p": 1.0}[kind]
    return np.asarray(share * size / us)


def sane(key: Key, samples: dict[Key, Samples]) -> Samples:
    """An all-gather's samples as far as the network can be what they show: neither outrun nor a fraction of it."""
    size, us = samples[key]
    if key[0] != "all_gather":
        return size, us
    reference = float(np.median(bandwidths(("all_reduce", *key[1:]), *samples["all_reduce", key[1], key[2]])))
    table = tabulate(size, us)
    share = bandwidths(key, np.array(table.bytes), np.array(table.us)) / reference
    bad = np.flatnonzero((share < SANE[0]) | (share > SANE[1]))
    end = table.bytes[bad[0]] * 2 ** (-0.5 / KNOTS_PER_OCTAVE) if len(bad) else np.inf
    if (size < end).sum() < 20:
        return size[:0], us[:0]
    return size[size < end], us[size < end]


def rings_of(samples: dict[Key, Samples]) -> Rings:
    """Ring bandwidths per pair of a node and per member between nodes, from the all-reduce; messages from p2p."""
    pairs, members = [], defaultdict(list)
    for key, (size, us) in samples.items():
        if key[0] != "all_reduce":
            continue
        value = float(np.median(bandwidths(key, size, us)))
        if key[1] == 1:
            pairs.append(value / (key[2] - 1))
        else:
            members[key[2]].append(value / key[2])
    sends = {key[1]: float(np.median(size / us)) for key, (size, us) in samples.items() if key[0] == "p2p"}
    return Rings(
        round(float(np.mean(pairs)), 1) if pairs else NO_LINKS,
        {inside: round(float(np.mean(values)), 1) for inside, values in sorted(members.items())},
        round(sends.get(1, NO_LINKS), 1),
        round(sends[2], 1),
    )


def errors(network: SampledNetwork, key: Key, size: Floats, us: Floats) -> Floats:
    """Percent off, sample by sample."""
    kind, nodes, inside = key
    group = Group(nodes * inside, inside)
    predicted = np.array([network.us(Collective(kind, float(s), group)) for s in size])
    return np.asarray(100 * np.abs(predicted / us - 1))


def show(site: str, network: SampledNetwork, samples: dict[Key, Samples]) -> None:
    print(f"{site}: error in percent on every other sample, held apart; of the ring formula; ring GB/s")
    for key, (all_size, _) in sorted(samples.items()):
        size, us = sane(key, samples)
        label = f"  {key[0]:10s} {key[1]} x {key[2]}  {len(all_size):5d} samples"
        if not len(size):
            print(f"{label}  not sane, the ring formula serves")
            continue
        half = replace(network, tables={key: tabulate(size[::2], us[::2])})
        table, formula = errors(half, key, size[1::2], us[1::2]), errors(replace(network, tables={}), key, size, us)
        cut = "" if len(size) == len(all_size) else f"  (kept up to {size[-1] / 1e9:.2f} GB: not sane beyond)"
        print(
            f"{label}  table mean {table.mean():5.2f} median {np.median(table):5.2f}  formula median "
            f"{np.median(formula):5.2f}  {np.median(bandwidths(key, size, us)) / 1e3:6.2f} GB/s{cut}"
        )


def main(folder: Path) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for site, gpus in SITES.items():
        samples = read(folder / site / "nccl")
        tables = []
        for kind, nodes, inside in sorted(samples):
            size, us = sane((kind, nodes, inside), samples)
            if len(size):
                table = tabulate(size, us)
                tables.append({"kind": kind, "nodes": nodes, "inside": inside, **table._asdict()})
        facts = {
            "name": site.lower(), "gpus_per_node": gpus,
            "source": "NCCL samples of arXiv 2509.22832 (MIT licence), calibration/fit_networks.py",
            "rings": rings_of(samples)._asdict(), "tables": tables,
        }  # fmt: skip
        show(site, decode(json.loads(json.dumps(facts))), samples)
        (FOLDER / f"{site.lower()}.json").write_text(_compact(facts), "utf-8")


def _compact(facts: dict[str, object]) -> str:
    """JSON with one table a line."""
    text = json.dumps({**facts, "tables": []}, indent=1)
    rows = ",\n  ".join(json.dumps(table) for table in facts["tables"])  # type: ignore[attr-defined]
    return text.replace('"tables": []', f'"tables": [\n  {rows}\n ]') + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
