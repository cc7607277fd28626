"""Fit network: tables of the collectives of a cluster from their samples, with the error on samples held apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lumos.costs.sampled_network import KINDS, Configuration, Rings, SampledNetwork, Table
from lumos.errors import InputError
from lumos.program.operators import Collective, Group

_KNOTS_PER_OCTAVE = 4
_LARGE = 4.0  # the largest message over those that count as large
_SANE = (0.6, 1.4)  # of the bandwidth that the all-reduce of the same ranks reaches: where an all-gather is believed
_LATENCY_BYTES = 1 << 24  # below it, kinds differ by their latencies
_FEWEST = 3  # samples of a configuration
_FASTEST = 5e6  # bytes per microsecond of one GPU: five times what any has
_WAY_OUT = "measure it again with `lumos sample`, or remove the line"

Floats = NDArray[np.float64]
Samples = tuple[Floats, Floats]  # bytes of the whole tensor, rising, and microseconds


def network_facts(rows: Iterable[tuple[str, Mapping[str, Any]]], gpus_per_node: int = 0) -> dict[str, Any] | None:
    """The section "network" of a model file from (place, row) of sampled collectives; None where there are none.

    Each table has the number of its samples, and its error on every other sample where it was fitted on the rest, in
    percent. `refused` names what was not believed.
    """
    refused: list[str] = []
    samples = _by_configuration(rows, refused)
    few = [key for key, (size, _) in samples.items() if len(size) < _FEWEST]
    refused += [f"{_named(key)}: fewer than {_FEWEST} samples" for key in few]
    samples = {key: found for key, found in samples.items() if len(found[0]) >= _FEWEST}
    kept = {key: _sane(key, samples) for key in samples}
    for key, (size, _) in kept.items():
        if len(size) < len(samples[key][0]):
            where = f"beyond {size[-1] / 1e9:.2f} GB it does" if len(size) else "its bandwidth does"
            refused.append(f"{_named(key)}: {where} not go with the all-reduce of the same ranks")
    kept = {key: found for key, found in kept.items() if len(found[0])}
    if not kept:
        return None
    node = gpus_per_node or max(key.inside for key in samples)
    rings = _rings(kept)
    errors = {key: _errors(key, found, node, rings) for key, found in kept.items()}
    tables = [
        {**key._asdict(), **_tabulate(*kept[key])._asdict(), "rows": len(kept[key][0]), "error_pct": _mean(errors[key])}
        for key in sorted(kept)
    ]
    return {
        "gpus_per_node": node,
        "rings": {name: {str(n): rate for n, rate in rates.items()} for name, rates in rings._asdict().items()},
        "tables": tables,
        "error_pct": _mean(np.concatenate(list(errors.values()))),
        "refused": refused,
    }


def _by_configuration(
    rows: Iterable[tuple[str, Mapping[str, Any]]], refused: list[str]
) -> dict[Configuration, Samples]:
    """The samples in order of size, without those that no network can have; InputError where most are such."""
    found: dict[Configuration, list[tuple[float, float, str]]] = defaultdict(list)
    for place, row in rows:
        if "us" in row:
            key, size, us = _checked(place, row)
            found[key].append((size, us, place))
    kept: dict[Configuration, Samples] = {}
    for key, values in found.items():
        likely = sorted((size, us) for size, us, _ in values if size <= _FASTEST * key.inside * us)
        if len(likely) < len(values):
            refused.append(f"{_named(key)}: {len(values) - len(likely)} samples that are faster than any network")
        if len(likely) > len(values) / 2:
            kept[key] = np.array([each[0] for each in likely]), np.array([each[1] for each in likely])
    if found and not kept:
        size, us, place = max(max(found.values()), key=lambda each: each[0] / each[1])
        raise InputError(
            f"{place}: {size:.0f} bytes in {us:g} us are {size / us / 1e6:.0f} TB/s, more than any network has: "
            "us are microseconds, and bytes those of the whole tensor; measure them again with `lumos sample`"
        )
    return kept


def _checked(place: str, row: Mapping[str, Any]) -> tuple[Configuration, float, float]:
    """One row, or InputError with what is wrong with it."""
    ranks, nodes, groups = (_count(place, row, name) for name in ("ranks", "nodes", "groups"))
    if ranks < 2 or ranks % nodes:
        raise InputError(f"{place}: ranks = {ranks} on nodes = {nodes} is no group of equal nodes; {_WAY_OUT}")
    size, us = (_positive(place, row, name) for name in ("bytes", "us"))
    return Configuration(str(row["op"]), nodes, ranks // nodes, groups), size, us


def _count(place: str, row: Mapping[str, Any], name: str) -> int:
    value = row.get(name, None if name == "ranks" else 1)
    if type(value) is not int or not 1 <= value <= 1 << 20:
        raise InputError(f"{place}: {name} = {str(value)[:40]} is no number of {name}; {_WAY_OUT}")
    return value


def _positive(place: str, row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e15:
        raise InputError(f"{place}: {name} = {str(value)[:40]} is no measured value; {_WAY_OUT}")
    return float(value)


def _tabulate(size: Floats, us: Floats) -> Table:
    """Medians over a quarter of an octave each, made to rise."""
    centres, medians = _medians(size, us)
    return Table(tuple(centres), tuple(_never_falling(medians)))


def _medians(size: Floats, us: Floats) -> tuple[list[float], list[float]]:
    """Bytes and microseconds: medians of the time for one byte, over a quarter of an octave each."""
    bins = np.floor(np.log2(size / size[0]) * _KNOTS_PER_OCTAVE).astype(int)
    centres, medians = [], []
    for index in np.unique(bins):
        some = bins == index
        centre = float(np.exp(np.log(size[some]).mean()))
        centres.append(float(round(centre)))
        medians.append(float(np.median(us[some] / size[some])) * centre)
    return centres, medians


def _never_falling(values: list[float]) -> list[float]:
    """The nearest series that never falls: neighbours that do are put together."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [round(float(np.mean(pool)), 3) for pool in pools for _ in pool]


def _bandwidth(key: Configuration, samples: Samples) -> float:
    """Bytes per microsecond of large messages through every link of a ring, as nccl-tests count them."""
    size, us = samples
    large = size >= size[-1] / _LARGE
    share = {"all_reduce": 2 * (key.ranks - 1) / key.ranks, "p2p": 1.0}.get(key.kind, (key.ranks - 1) / key.ranks)
    return float(np.median(share * size[large] / us[large]))


def _sane(key: Configuration, samples: Mapping[Configuration, Samples]) -> Samples:
    """The samples of an all-gather as far as the network can be what they show, beside its all-reduce.

    Published samples have all-gathers that outrun the network, or take twice as long, from some size on.
    """
    size, us = samples[key]
    reduced = samples.get(key._replace(kind="all_reduce"))
    if key.kind != "all_gather" or reduced is None:
        return size, us
    reference, (centres, medians) = _tabulate(*reduced), map(np.array, _medians(size, us))
    share = np.array([reference.at(centre, 0.0) for centre in centres]) / 2 / medians
    bad = np.flatnonzero(((share < _SANE[0]) | (share > _SANE[1])) & (centres >= _LATENCY_BYTES))
    end = centres[bad[0]] * 2 ** (-0.5 / _KNOTS_PER_OCTAVE) if len(bad) else np.inf
    believed = size < end
    return (size[believed], us[believed]) if believed.sum() >= _FEWEST else (size[:0], us[:0])


def _rings(samples: Mapping[Configuration, Samples]) -> Rings:
    """What links give: by the all-reduce, or else the first kind that was sampled in that tier."""
    found: list[dict[int, list[float]]] = []
    for inside in (True, False):
        tier = {key: value for key, value in samples.items() if (key.nodes == 1) == inside}
        alone = {key: value for key, value in tier.items() if key.groups == 1} or tier
        kind = next((kind for kind in KINDS if any(key.kind == kind for key in alone)), "")
        rates: dict[int, list[float]] = defaultdict(list)
        for key, value in sorted(alone.items()):
            if key.kind == kind:
                rates[key.inside].append(_bandwidth(key, value) / (1 if inside or kind == "all_to_all" else key.inside))
        found.append(rates)
    return Rings(*({n: round(float(np.mean(some)), 1) for n, some in sorted(rates.items())} for rates in found))


def _errors(key: Configuration, samples: Samples, node: int, rings: Rings) -> Floats:
    """Percent that a table of every other sample is off on the samples between them."""
    size, us = samples
    network = SampledNetwork(node, {key: _tabulate(size[::2], us[::2])}, rings, crowded=key.groups > 1)
    group = Group(key.ranks, key.inside)
    predicted = np.array([network.us(Collective(key.kind, float(s), group)) for s in size[1::2]])
    return np.asarray(100 * np.abs(predicted / us[1::2] - 1))


def _mean(errors: Floats) -> float:
    return round(float(errors.mean()), 2)


def _named(key: Configuration) -> str:
    return f"{key.kind} of {key.ranks} on {key.nodes} node{'s' if key.nodes > 1 else ''}"
